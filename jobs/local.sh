#!/bin/bash
# MNIST on two ranks of this machine, without a batch system.

# To change a value: NAME=VALUE bash SCRIPT
DATA=${DATA:-}
EPOCHS=${EPOCHS:-6}
STEPS=${STEPS:-}
RESULTS=${RESULTS:-results/mnist}

# The Python environment; its programs come first.
HVDTRAIN_ENV=${HVDTRAIN_ENV:-.venv}
HVDTRAIN_ENV=$(realpath -e -- "$HVDTRAIN_ENV") || exit 2
export PATH="$HVDTRAIN_ENV/bin:$PATH"

hvdtrain launch -n 2 --ppn 2 -- \
    python -m hvdtrain.mnist ${DATA:+"--data=$DATA"} "--epochs=$EPOCHS" \
    ${STEPS:+"--num-steps=$STEPS"} "--checkpoint-dir=$RESULTS/checkpoints" \
    "--summary=$RESULTS/summary.json"
