#!/usr/bin/env bash
# The homework's runs on the cores of this machine, and their plots:
#     DATA=/path/to/mnist homework/run_all.sh
# A run whose metrics are there is not made again. Without DATA: scikit-learn's digits.
# The next lines tell what else can be set.
set -euo pipefail
cd "$(dirname "$0")"
: "${OUT:=results}" "${FRAMEWORKS:=pytorch tensorflow2}" "${RANKS:=1 2 4 8}" "${WARMUPS:=0 1}"
: "${EPOCHS:=8}" "${BATCH:=256}" "${LR:=0.04}"

# Where ranks share cores, one that waits should make way. Where steps are short, Horovod should
# look for work more often. And memory that a step frees is kept for the next.
export OMPI_MCA_mpi_yield_when_idle=1 HOROVOD_CYCLE_TIME=0.5
export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=2147483647

note() { # what stands below the plots of a framework
    local module=${1/tensorflow2/tensorflow}
    python -c "import horovod, ${module/pytorch/torch} as f
print(f.__name__, f.__version__.split('+')[0] + ', Horovod', horovod.__version__ + ';', end=' ')"
    echo "$([ -n "${DATA:-}" ] && echo MNIST || echo "scikit-learn's digits"), batch $BATCH per rank," \
        "SGD with learning rate $LR per rank and momentum 0.9, warm-up over ${WARMUPS##* } epoch; run on" \
        "$(date +%F) on a machine of $(nproc) cores: more ranks than that share them, so that their" \
        "seconds tell nothing of scaling"
}

for framework in $FRAMEWORKS; do
    plain=$OUT/$framework
    mkdir -p "$plain"
    for ranks in $RANKS; do
        for warmup in $WARMUPS; do
            folder=$plain
            if [ "$warmup" != 0 ]; then
                [ "$ranks" -gt 1 ] || continue # one rank has nothing to warm up to
                folder=$plain-warmup
            fi
            metrics=$folder/metrics_$ranks.csv
            if [ -f "$metrics" ] && [ "$(wc -l <"$metrics")" -gt "$EPOCHS" ]; then continue; fi
            echo "$metrics"
            mpirun --oversubscribe --bind-to none -n "$ranks" python "${framework}_mnist_hvd.py" \
                ${DATA:+--data "$DATA"} --epochs "$EPOCHS" --batch-size "$BATCH" --lr "$LR" \
                --warmup-epochs "$warmup" --out "$folder"
            rm -f "$folder"/model.*
            note "$framework" >"$plain/note.txt" 2>/dev/null
        done
    done
    python plot_accuracy.py "$plain" --warmup "$plain-warmup"
done
