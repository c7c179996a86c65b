"""The training script `train_fair.py` in three rounds of Fed-LWR, which asks every site twice a round."""

from nvflare.recipe.sim_env import SimEnv

from fairflare.recipes import ScriptRecipe

if __name__ == "__main__":
    recipe = ScriptRecipe("fed_lwr", train_script="train_fair.py", model="Net", sites=2, num_rounds=3)
    recipe.export("jobs")
    recipe.execute(SimEnv(num_clients=2, workspace_root="simulator"))
