#!/usr/bin/env bash
# A provisioned network of three hospitals from beginning to end, on this machine: kits, policies, start, a signed job
# of the lead scientist, an abort, a resume, logs, download, its model tested again without training, what is refused,
# shutdown; and the same bits, and the same figures of groups of people, as FLARE's simulator gives.
# Needs nothing but the installed package; leaves nothing behind (KEEP=1 keeps the folder).
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

step "kits"
read -r service admin < <(free_ports)
sed "s/fed_learn_port: .*/fed_learn_port: $service/; s/admin_port: .*/admin_port: $admin/; \
  s#/tmp/fairflare_demo#$folder/server#; s/\"\\*\": {isolate: false}/\"*\": {isolate: false, num_threads: 1}\n        \
hospital-a: {phantom_site: 1}\n        hospital-b: {phantom_site: 2}\n        hospital-c: {phantom_site: 3}/" \
  "$repository/poc/project.yml" > project.yml
nvflare provision -p project.yml -w provisioned
kits="$folder/provisioned/fairflare_demo/prod_00"
hospitals=(hospital-a hospital-b hospital-c)
for name in localhost "${hospitals[@]}"; do
  fairflare doctor --kit "$kits/$name"
done
# Before a site starts, not while it runs: FLARE's check takes a running site's token.
nvflare preflight-check -p "$kits/localhost"

step "start"
for name in localhost "${hospitals[@]}"; do
  (cd "$kits/$name" && nohup ./startup/start.sh > start.out 2>&1 < /dev/null &)
done
as_lead=(--startup-kit "$kits/lead@consortium.example")
as_admin=(--startup-kit "$kits/admin@consortium.example")
wait_for_sites 'hospital-[abc]' 3 "${as_lead[@]}"

step "the lead scientist submits"
names=$(IFS=,; echo "${hospitals[*]}")
# With the bounds that --preinstalled has by itself, so that the run it is compared with has them too.
bounds=(--set max_weight=auto --set max_excess=0.16 --set max_samples=100000 --set max_update_norm=3)  # an export has them
# Images of two skin tones at each hospital; the kits' privacy floor keeps classes with few of a tone at home, in both.
images=(--task classification --set attributes=true --set 'groups=["tone"]' --set phantom_samples=900 \
  --set 'image_size=[48,48]' --set 'features=[8,16,16,32]' --set max_pool=false)
what=(fed_lwr --rounds 3 --seed 7 --timeout 600 "${images[@]}" --set local_epochs=1 --set min_cases=5 "${bounds[@]}")
fairflare export "${what[@]}" --sites "$names" --experiment walk --out jobs --preinstalled
job=$(submit jobs/fed_lwr "${as_lead[@]}")

step "abort after the first round"
progress="$kits/localhost/$job/fairflare/progress.jsonl"
for _ in $(seq 300); do
  if grep -qs '"kind": *"round_done"' "$progress"; then break; fi
  sleep 1
done
nvflare job abort "$job" --force "${as_lead[@]}"
nvflare job wait "$job" --timeout 120 "${as_lead[@]}" || true

step "the same job again goes on"
job=$(submit jobs/fed_lwr "${as_lead[@]}")
nvflare job wait "$job" --timeout 600 "${as_lead[@]}"
nvflare job logs "$job" "${as_lead[@]}" > job.log
grep -o "experiment 'walk': going on at round [0-9]*" job.log | head -1
nvflare job download "$job" -o results "${as_lead[@]}"
fairflare show "results/$job"

step "its model again, without training"
fairflare evaluate "results/$job" --last --sites "$names" --job jobs --set 'groups=["tone"]' --set min_cases=5
tested=$(submit jobs/evaluate "${as_lead[@]}")
nvflare job wait "$tested" --timeout 600 "${as_lead[@]}"
nvflare job download "$tested" -o results "${as_lead[@]}"
same_figures "results/$job/workspace/fairflare/results.json" \
  "results/$tested/workspace/evaluation/$job/fairflare/results.json"

step "refused: a member submits"
if said=$(submit jobs/fed_lwr --startup-kit "$kits/member@consortium.example" 2>&1); then
  echo "a member could submit: $said" >&2
  exit 1
fi
grep -m 1 "not authorized" <<<"$said"

refused() { # JOB-FOLDER WORDS: it is taken, does not run, and the words stand in its status or its logs
  local id
  id=$(submit "$1" "${as_lead[@]}")
  if nvflare job wait "$id" --timeout 180 "${as_lead[@]}" > refused.log 2>&1; then
    cat refused.log >&2
    echo "$1 was not refused" >&2
    exit 1
  fi
  nvflare job meta "$id" "${as_lead[@]}" >> refused.log 2>&1 || true
  cat "$kits"/hospital-*/log.txt "$kits"/hospital-*/"$id"/log.txt >> refused.log 2>/dev/null || true
  grep -om 1 "FINISHED:.*" refused.log
  grep -om 1 "$2" refused.log
}

step "refused: a job with code of its own"
fairflare export fed_avg --sites "$names" --rounds 1 --out byoc
refused byoc/fed_avg "BYOC not permitted"

step "refused: a class that the hospitals do not allow"
fairflare export fed_avg --sites "$names" --rounds 1 --out foreign --preinstalled
sed -i 's/fairflare\.flare\.executor\.SiteExecutor/subprocess.Popen/' foreign/fed_avg/app/config/config_fed_client.json
refused foreign/fed_avg "Component 'subprocess.Popen'.*is not in allow_list"

step "shutdown"
within 180 nvflare system shutdown all "${as_admin[@]}" --force --timeout 120 ||
  echo "FLARE did not stop everything in time; what still runs is ended with this script"

step "the same in FLARE's simulator"
echo '{"sites": {"hospital-a": {"phantom_site": 1}, "hospital-b": {"phantom_site": 2}, "hospital-c": {"phantom_site": 3}}}' > sites.json
fairflare run "${what[@]}" --sites "$names" --data sites.json -w simulated --threads 3
same_model "results/$job/workspace/FL_global_model.pt" simulated/server/simulate_job/FL_global_model.pt
same_figures "results/$job/workspace/fairflare/results.json" simulated/server/simulate_job/fairflare/results.json
step "done"
