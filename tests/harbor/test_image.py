"""What an image says of its containers, and Harbor does: USER, ENTRYPOINT, HEALTHCHECK, ENV, WORKDIR."""

from __future__ import annotations

import pytest

from hermes_core.soundness.validate import validate
from tests.harbor.harbor_tasks import PYTHON, Shell, roll_out, write_task
from tests.harbor.task_folders import scored

ENTRY = (
    "RUN printf '#!/bin/sh\\nid -un >/app/service\\n(while :; do date >/app/beat; sleep 0.1; done) &\\nexec \"$@\"\\n' "
    '>/entry.sh && chmod 755 /entry.sh\nENTRYPOINT ["/entry.sh"]\n'
)
BEATS = "beats() { for _ in $(seq 200); do [ ! -s beat ] || return 0; sleep 0.1; done; return 1; }\n"
IMAGES = {
    "name": ("USER user\n", "id -un >out", '[ "$(cat out)$(id -un)" = useruser ]'),
    "uid": ("USER 1234\n", "id -u >out", '[ "$(cat out)$(id -u)" = 12341234 ]'),
    "group": ("USER user:4321\n", "id -G >out", '[ "$(cat out)" = 4321 ]'),
    "nobody-s": ("USER 4000:4001\n", 'echo "$(id -u) $(id -G) $HOME" >out', '[ "$(cat out)" = "4000 4001 /" ]'),
    "root": ("USER user\n", "id -u >out", '[ "$(cat out)$(id -un)" = 0user ]'),
    "entrypoint": (ENTRY, "cp service out", '[ "$(cat out)" = root ] && rm beat && beats'),
    "entrypoint-s-user": (f"{ENTRY}USER user\n", "cp service out", '[ "$(cat out)" = user ]'),
    "healthcheck": (
        "ENV SEEN=/app/seen\nHEALTHCHECK --interval=100ms CMD [ -f $SEEN ] || { touch $SEEN; false; }\n",
        "cp $SEEN out; echo $SEEN >>out",
        '[ "$(cat out)" = /app/seen ]',
    ),
}
"""For each image the end of its Dockerfile, the solution, and what the tests look for."""


ALONE = ("nobody-s", "entrypoint-s-user", "healthcheck")
"""Those that are tried in sandboxes of their own, too."""


def write_tasks(folder, names):
    for name in names:
        dockerfile, solve, check = IMAGES[name]
        built = f"FROM {PYTHON}\nRUN useradd -m -u 1234 user && mkdir -m 777 /app && groupadd -g 4321 more\n"
        toml = '[agent]\nuser = "root"' if name == "root" else ""
        files = {"environment/Dockerfile": f"{built}WORKDIR /app\n{dockerfile}"}
        write_task(folder / name, toml, image=None, files=files, solve=f"{solve}\n", test=BEATS + scored(check))


@pytest.mark.parametrize("level", ["private-root", "dedicated"])
async def test_commands_run_as_in_a_container_of_the_image(runtime, tmp_path, level):
    names = IMAGES if level == "private-root" else ALONE
    write_tasks(tmp_path / "tasks", names)
    given = {"backend_config": {"cap_add": ["SYS_ADMIN"]}} if level == "private-root" else {"isolation": level}
    env = {"dataset_name": str(tmp_path / "tasks")}
    outcome = await validate(runtime, "harbor", env=env, concurrency=2, backend="docker", **given)
    assert outcome.sound, outcome.unsound
    assert outcome.items == len(names)


async def test_an_agent_is_the_image_s_user_and_what_it_breaks_scores_zero(runtime, tmp_path):
    secret = f"FROM {PYTHON}\nRUN useradd user && mkdir -m 700 /secret && mkdir /app && chown user /app\nWORKDIR /app\n"
    write_task(tmp_path / "task", image=None, files={"environment/Dockerfile": f"{secret}{ENTRY}USER user\n"})
    agent = Shell("id -un; ls /secret; echo exit 1 >/entry.sh", "pkill -u user; rm -rf /app/*")
    record = (await roll_out(runtime, tmp_path, agent))["task"]
    assert agent.answers[0]["output"].startswith("user") and "Permission denied" in agent.answers[0]["output"]
    assert (record["reward"], record["failure"]) == (0.0, None)


async def test_an_entrypoint_that_ends_is_told(runtime, tmp_path):
    files = {"environment/Dockerfile": f'FROM {PYTHON}\nENTRYPOINT ["ls", "/nowhere"]\n'}
    write_task(tmp_path / "task", image=None, files=files)
    record = (await roll_out(runtime, tmp_path, "nop"))["task"]
    assert record["failure"]["kind"] == "setup"
    assert "ENTRYPOINT ended at once: ls: cannot access" in record["failure"]["message"]
