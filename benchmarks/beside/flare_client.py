"""Run the site of FLARE's own FedAvg in ``bench_beside.py``: a script with its Client API."""

import beside_common as common
import nvflare.client as flare
import torch

flare.init()
site = int(flare.get_site_name().removeprefix("site-")) - 1
data = {split: common.images(site, split) for split in common.IMAGES}
model = common.build()
while flare.is_running():
    received = flare.receive()
    model.load_state_dict({name: torch.as_tensor(value) for name, value in received.params.items()})
    score = common.evaluate(model, *data["validation"])
    common.train(model, *data["training"], seed=100 * received.current_round + site)
    params = {name: value.cpu() for name, value in model.state_dict().items()}
    flare.send(flare.FLModel(params=params, metrics={"dice": score}, meta={"NUM_STEPS_CURRENT_ROUND": 6}))
