#!/usr/bin/env bash
# FLARE's POC mode from beginning to end: one server and three sites in processes of their own, a job without custom
# code, its results, and the same bits as a run in one process. Needs nothing but the installed package; leaves nothing
# behind (KEEP=1 keeps the folder).
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

step "three sites, on free ports"
read -r service admin < <(free_ports)
sed "s/fed_learn_port: .*/fed_learn_port: $service/; s/admin_port: .*/admin_port: $admin/" \
  "$repository/poc/poc.yml" > poc.yml
export NVFLARE_POC_WORKSPACE="$folder/poc"
nvflare poc prepare -i poc.yml
kits="$folder/poc/fairflare_poc/prod_00"

step "every participant allows the package's classes"
for name in localhost site-1 site-2 site-3; do
  "$python" - "$kits/$name/local" <<'END'
import json, pathlib, sys
local = pathlib.Path(sys.argv[1])
path = local / "resources.json"
resources = json.loads((path if path.exists() else local / "resources.json.default").read_text())
from fairflare.provision import job_classes
resources["class_allow_list"] += job_classes()
path.write_text(json.dumps(resources, indent=2))
(local / "fairflare.json").write_text('{"num_threads": 1}')  # made-up images: a hospital sets min_cases, a kit comes with it
END
  fairflare doctor --kit "$kits/$name"
done

step "start"
within 120 nvflare poc start --timeout 100 || true
wait_for_sites 'site-[123]' 3

step "a job"
# With the bounds that --preinstalled has by itself, so that the run it is compared with has them too.
bounds=(--set max_weight=auto --set max_excess=0.16 --set max_samples=100000 --set max_update_norm=3)  # an export has them
what=(fed_lwr --sites 3 --rounds 2 --seed 7 --set phantom_cases=0.5 --set local_epochs=1 "${bounds[@]}")
fairflare export "${what[@]}" --out jobs --preinstalled
job=$(submit jobs/fed_lwr)
nvflare job wait "$job" --timeout 600
nvflare job download "$job" -o results
fairflare show "results/$job"

step "stop"
nvflare poc stop

step "the same in one process"
OMP_NUM_THREADS=1 fairflare run "${what[@]}" --in-process -w here
same_model "results/$job/workspace/FL_global_model.pt" here/server/simulate_job/FL_global_model.pt
step "done"
