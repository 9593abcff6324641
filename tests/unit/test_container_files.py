"""Files for containers, as far as they can be judged without Docker and a cluster: what they name
is there, and the training that they start is one.
"""

import re
import shlex
from pathlib import Path

import yaml

from ragen_mega.commands import program
from ragen_mega.config import parse

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "examples/container/Dockerfile"
JOB = ROOT / "examples/kubernetes/train.yaml"
JOB_OF_NODES = ROOT / "examples/kubernetes/nodes.yaml"
WORKFLOW = ROOT / ".github/workflows/ci.yml"


def training(words: list[str]) -> list[str]:
    """Return the flags behind `train`, which the configuration takes."""
    assert words[0] == "train" and words[0] in str(program.COMMANDS)
    parse(words[1:])
    return words[1:]


def test_the_image_installs_what_the_repository_has() -> None:
    lines = DOCKERFILE.read_text().replace("\\\n", " ").splitlines()
    instructions = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    kinds = [kind for kind, _ in instructions]
    assert kinds == ["ARG", "FROM", "ARG", "WORKDIR", "COPY", "RUN", "WORKDIR", "ENV", "ENTRYPOINT"]
    run = dict(instructions)["RUN"]
    for file in re.findall(r"-c (\S+)", run):
        assert (ROOT / file).is_file(), file
    extras = re.findall(r"\.\[(\w+)\]", run)
    setup = (ROOT / "setup.py").read_text()
    assert extras == ["studies", "h100"] and all(f'"{extra}"' in setup for extra in extras)
    assert dict(instructions)["ENTRYPOINT"] == '["ragen-mega"]' and "ragen-mega = " in setup
    assert ".git" in (ROOT / ".dockerignore").read_text().split()


def test_the_job_of_kubernetes_trains_resumes_and_mounts_what_it_names() -> None:
    job = yaml.safe_load(JOB.read_text())
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    flags = training(container["args"])
    assert "--resume" in flags and pod["restartPolicy"] == "OnFailure"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    (place,) = re.findall(r"WORKDIR (/work)\b", DOCKERFILE.read_text())
    assert mounts == {"work": place, "memory": "/dev/shm"}
    # ranks that compute have ten minutes after a signal
    assert pod["terminationGracePeriodSeconds"] >= 600
    assert container["resources"]["limits"]["nvidia.com/gpu"] >= 1


def test_the_job_of_several_nodes_is_that_of_one_with_a_launcher_in_each_pod() -> None:
    service, job = yaml.safe_load_all(JOB_OF_NODES.read_text())
    name, spec = job["metadata"]["name"], job["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] > 1
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    launcher, script = (" ".join(container["args"]) + " ").split(" --no-python ragen-mega ")
    (node,) = container["env"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    # pods of an indexed job bear its name and their index, in the domain of the service
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["clusterIP"] == "None"
    assert launcher == (
        f"launch --nnodes {spec['completions']} --node-rank $({node['name']}) --nproc-per-node"
        f" {gpus} --master-addr {name}-0.{pod['subdomain']} --master-port 29500"
    )
    assert "--resume" in training(shlex.split(script))
    one = yaml.safe_load(JOB.read_text())["spec"]["template"]["spec"]
    alike = {key: value for key, value in pod.items() if key not in ("containers", "subdomain")}
    assert alike == {key: value for key, value in one.items() if key != "containers"}
    for key in ("image", "resources", "volumeMounts"):
        assert container[key] == one["containers"][0][key]


def test_the_workflow_builds_the_image_and_trains_in_it() -> None:
    steps = yaml.safe_load(WORKFLOW.read_text())["jobs"]["image"]["steps"]
    build, run = (shlex.split(step["run"]) for step in steps if "run" in step)
    assert ROOT / build[build.index("-f") + 1] == DOCKERFILE
    image = build[build.index("-t") + 1]
    assert run[:2] == ["docker", "run"] and training(run[run.index(image) + 1 :])
