# ruff: noqa: E501
"""Summaries of the presets, written by `python -m memjax.cli.describe`."""

TRAIN = """\
preset                 mechanism                                       layers x width  context
transformer-tiny       sliding windows of 64                           4 x 128         2,048
elastic-tiny           elastic_memory in layer 3, else sliding_window  4 x 128         2,048
hybrid-tiny            sliding_window in layer 4, else trellis         4 x 128         2,048
deltanet-tiny          deltanet                                        4 x 128         2,048
gated_deltanet-tiny    gated_deltanet                                  4 x 128         2,048
gla-tiny               gla                                             4 x 128         2,048
abc-tiny               abc                                             4 x 128         2,048
gsa-tiny               gsa                                             4 x 128         2,048
lattice-tiny           lattice                                         4 x 128         2,048
linear_attention-tiny  linear_attention                                4 x 128         2,048
mamba2-tiny            mamba2                                          4 x 128         2,048
trellis-tiny           trellis                                         4 x 128         2,048
ttt_linear-tiny        ttt_linear                                      4 x 128         2,048
transformer-100m       sliding windows of 2,048                        12 x 768        32,768
transformer-200m       sliding windows of 2,048                        12 x 1,152      32,768
transformer-400m       sliding windows of 2,048                        12 x 1,536      32,768
transformer-125m       full attention                                  12 x 768        2,048
transformer-170m       full attention                                  12 x 768        2,048
transformer-350m       full attention                                  24 x 1,024      2,048
transformer-780m       full attention                                  24 x 1,536      2,048
elastic-100m           elastic_memory in layer 9, else sliding_window  12 x 768        32,768
elastic-200m           elastic_memory in layer 9, else sliding_window  12 x 1,152      32,768
elastic-400m           elastic_memory in layer 9, else sliding_window  12 x 1,536      32,768
hybrid-125m            3 x trellis, then attention                     12 x 768        2,048
hybrid-170m            3 x trellis, then attention                     12 x 768        2,048
hybrid-350m            3 x trellis, then attention                     24 x 1,024      2,048
hybrid-780m            3 x trellis, then attention                     24 x 1,536      2,048
deltanet-125m          deltanet                                        12 x 768        2,048
deltanet-170m          deltanet                                        12 x 768        2,048
deltanet-350m          deltanet                                        24 x 1,024      2,048
deltanet-780m          deltanet                                        24 x 1,536      2,048
gated_deltanet-125m    gated_deltanet                                  12 x 768        2,048
gated_deltanet-170m    gated_deltanet                                  12 x 768        2,048
gated_deltanet-350m    gated_deltanet                                  24 x 1,024      2,048
gated_deltanet-780m    gated_deltanet                                  24 x 1,536      2,048
gla-125m               gla                                             12 x 768        2,048
gla-170m               gla                                             12 x 768        2,048
gla-350m               gla                                             24 x 1,024      2,048
gla-780m               gla                                             24 x 1,536      2,048
abc-125m               abc                                             12 x 768        2,048
abc-170m               abc                                             12 x 768        2,048
abc-350m               abc                                             24 x 1,024      2,048
abc-780m               abc                                             24 x 1,536      2,048
gsa-125m               gsa                                             12 x 768        2,048
gsa-170m               gsa                                             12 x 768        2,048
gsa-350m               gsa                                             24 x 1,024      2,048
gsa-780m               gsa                                             24 x 1,536      2,048
lattice-125m           lattice                                         12 x 768        2,048
lattice-170m           lattice                                         12 x 768        2,048
lattice-350m           lattice                                         24 x 1,024      2,048
lattice-780m           lattice                                         24 x 1,536      2,048
linear_attention-125m  linear_attention                                12 x 768        2,048
linear_attention-170m  linear_attention                                12 x 768        2,048
linear_attention-350m  linear_attention                                24 x 1,024      2,048
linear_attention-780m  linear_attention                                24 x 1,536      2,048
mamba2-125m            mamba2                                          12 x 768        2,048
mamba2-170m            mamba2                                          12 x 768        2,048
mamba2-350m            mamba2                                          24 x 1,024      2,048
mamba2-780m            mamba2                                          24 x 1,536      2,048
trellis-125m           trellis                                         12 x 768        2,048
trellis-170m           trellis                                         12 x 768        2,048
trellis-350m           trellis                                         24 x 1,024      2,048
trellis-780m           trellis                                         24 x 1,536      2,048
ttt_linear-125m        ttt_linear                                      12 x 768        2,048
ttt_linear-170m        ttt_linear                                      12 x 768        2,048
ttt_linear-350m        ttt_linear                                      24 x 1,024      2,048
ttt_linear-780m        ttt_linear                                      24 x 1,536      2,048
"""

FINETUNE = """\
preset                     memory                       sizes                                           context  steps
hmt-tiny                   HMT, both stages             segments of 64, bank 16                         256      100 + 300
hmt                        HMT, both stages             segments of 1,024, bank 300                     15,360   200 + 500
hmt-stage1                 HMT, stage 1                 segments of 1,024                               2,048    200
hmt-stage2                 HMT, stage 2                 segments of 1,024, bank 300                     15,360   500
rmt                        RMT                          segments of 1,024                               2,048    700
window                     none: a window               window 1,024                                    2,048    700
sinks                      none: a window               window 1,024, 4 sinks                           2,048    700
reread                     none: the last tokens again  1,024 before segments of 1,024                  2,048    700
hmt-opt-350m               HMT, both stages             segments of 1,024, bank 300                     15,360   200 + 500
hmt-smollm-135m            HMT, both stages             segments of 1,024, bank 300                     15,360   200 + 500
hmt-opt-2.7b               HMT, both stages             segments of 512, bank 300                       4,096    200 + 500
hmt-openllama-3b           HMT, both stages             segments of 512, bank 300                       4,096    200 + 500
hmt-rwkv-3b                HMT, both stages             segments of 256, bank 400                       1,280    200 + 500
hmt-mamba-370m             HMT, both stages             segments of 256, bank 400, LoRA                 1,536    200 + 500
hmt-llama2-7b              HMT, both stages             segments of 256, bank 400, LoRA                 2,048    200 + 500
hmt-yi-6b                  HMT, both stages             segments of 512, bank 300, LoRA                 1,536    200 + 500
hmt-mistral-7b             HMT, both stages             segments of 512, bank 300, LoRA                 1,536    200 + 500
mplus                      M+, all three stages         32 tokens per 128, pool 256, store 4,096        1,024    400 + 400 + 400
mplus-stage1               MemoryLLM                    32 tokens per 128, pool 320                     1,024    400
mplus-stage2               MemoryLLM                    32 tokens per 128, pool 320                     1,024    400
mplus-stage3               M+, stage 3                  32 tokens per 128, pool 256, store 4,096        1,024    400
mplus-smollm2-135m         M+, all three stages         128 tokens per 256, pool 512, store 4,096       512      240 + 240 + 240
mplus-smollm2-135m-stage1  MemoryLLM                    128 tokens per 256, pool 1,024                  512      240
mplus-smollm2-135m-stage2  MemoryLLM                    128 tokens per 256, pool 1,024                  512      240
mplus-smollm2-135m-stage3  M+, stage 3                  128 tokens per 256, pool 512, store 4,096       512      240
mplus-paper                M+, all three stages         256 tokens per 512, pool 10,240, store 153,600  4,096    1,200,000 + 125,000 + 125,000
mplus-paper-stage1         MemoryLLM                    256 tokens per 512, pool 12,800                 4,096    1,200,000
mplus-paper-stage2         MemoryLLM                    256 tokens per 512, pool 12,800                 4,096    125,000
mplus-paper-stage3         M+, stage 3                  256 tokens per 512, pool 10,240, store 153,600  4,096    125,000
retrofit-tiny              lattice in 2 layers          window 64, 4 sinks                              512      100 + 300
retrofit                   lattice in 6 layers          window 256, 4 sinks                             2,048    512 + 384
"""
