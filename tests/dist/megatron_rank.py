"""One rank of test_megatron.py: unmodified megatron-core on the transformer_engine face.

RANK=0 WORLD_SIZE=2 python megatron_rank.py FOLDER same|train|resume|limits…
"""

if __name__ == "__main__":  # the process that collects what was written of a checkpoint imports this file, too
    import megatron_cases

    megatron_cases.main()
