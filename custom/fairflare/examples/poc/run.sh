#!/usr/bin/env bash
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
folder="$PWD/poc"
export HOME="$PWD/home" NVFLARE_POC_WORKSPACE="$folder"   # nvflare keeps its settings in the home folder
mkdir -p "$HOME"
read -r service admin < <(python -c "
import socket
found = [socket.socket() for _ in range(2)]
for one in found:
    one.bind(('127.0.0.1', 0))
print(*(one.getsockname()[1] for one in found))")
sed "s/fed_learn_port: .*/fed_learn_port: $service/; s/admin_port: .*/admin_port: $admin/" poc.yml > network.yml
nvflare poc prepare -i network.yml
python allow.py "$folder/fairflare_poc/prod_00" localhost site-1 site-2 site-3

trap 'nvflare poc stop || true' EXIT
timeout 120 nvflare poc start --timeout 100 || true   # it may hang although all are up
for what in "fairflare stats --job jobs" "fairflare export fed_lwr --preinstalled --out jobs --rounds 2 --set phantom_cases=0.5"; do
  $what --overwrite
done
for name in stats fed_lwr; do
  job=$(nvflare job submit -j "jobs/$name" | awk '/job_id/ {print $2}')
  nvflare job wait "$job" --timeout 600
  nvflare job download "$job" -o results
  ls "results/$job/workspace/fairflare"
done
fairflare show "results/$job"
