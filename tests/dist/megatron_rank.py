"""One rank of test_megatron.py: unmodified megatron-core and Transformer Engine on simulated devices.

RANK=0 WORLD_SIZE=2 python megatron_rank.py FOLDER CASE… (see CASES)
"""

if __name__ == "__main__":  # a process that writes checkpoints imports this file too
    import megatron_cases
    import megatron_dimensions

    megatron_cases.main(megatron_cases.CASES | megatron_dimensions.CASES)
