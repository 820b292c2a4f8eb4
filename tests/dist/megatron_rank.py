"""One rank of test_megatron.py: unmodified megatron-core on the Transformer Engine compatibility layer.

RANK=0 WORLD_SIZE=2 python megatron_rank.py FOLDER same|train|resume|limits…
"""

if __name__ == "__main__":  # a process that writes checkpoints imports this file too
    import megatron_cases

    megatron_cases.main()
