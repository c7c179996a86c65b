#!/usr/bin/env bash
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
[ -d data ] || fairflare phantom volumes3d --sites 2 --cases 0.4 --out data   # NIfTI; your own: fairflare prepare volumes
fairflare stats --data data --out stats --overwrite --set min_cases=1
fairflare doctor --monai-bundle my_bundle
fairflare run fed_lwr --in-process --monai-bundle my_bundle --data data/fairflare.json --rounds 1 --overwrite
fairflare export fed_lwr --monai-bundle my_bundle --out jobs --overwrite
