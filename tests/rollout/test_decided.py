"""Who is to blame for a verification without a result: an untouched environment decides."""

import pytest

from hermes_core.errors import AcquireTimeout, ChannelLost, Disturbed, SandboxLost, SetupFailed, SlotLost, VerifierError
from hermes_core.rollout import rollout
from tests.rollout.test_rollout import Doing, Plain, Slots, parts, roll

NO, DISTURBED, UNREADY = VerifierError("no reward"), Disturbed("pytest was killed"), SetupFailed("no room")


async def works(task):
    await task.tool_handler("shell", {"text": "x"}, "")


def verifies(*outcomes):
    """A verification that has these outcomes, one after the other; the last for ever."""
    left = list(outcomes)

    async def hook(_):
        outcome = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return hook


@pytest.mark.parametrize(
    ("outcomes", "reward", "kind"),  # with the work, without it, with the work
    [
        ([NO, 0.0, NO], 0.0, None),
        ([NO, 1.0, DISTURBED], 0.0, None),
        ([DISTURBED, 0.0, DISTURBED], 0.0, None),
        ([NO, 0.0, 1.0], 1.0, None),  # the tests' tools could be had again
        ([UNREADY, 0.0, UNREADY], 0.0, None),
        ([NO, NO], None, "verifier"),
        ([UNREADY, UNREADY], None, "setup"),
        ([NO, ZeroDivisionError()], None, "verifier"),
        ([NO, SandboxLost("gone"), 0.5], 0.5, None),  # nobody can tell, so it is begun anew
    ],
)
async def test_a_verification_without_a_result_is_tried_where_nobody_worked(outcomes, reward, kind):
    backend = Slots()
    done = await roll(Plain(verify=verifies(*outcomes)), agent=Doing(works), backend=backend)
    assert (done.reward, done.failure and str(done.failure.kind)) == (reward, kind)
    assert backend.log.count("acquire fresh") == backend.log.count("release fresh") == 1
    if reward == 0.0:
        assert "an untouched environment can be verified" in done.details["reason"]


async def test_an_agent_that_did_nothing_is_not_to_blame():
    backend = Slots()
    done = await roll(Plain(verify=verifies(NO, 1.0)), backend=backend)
    assert (done.reward, str(done.failure.kind)) == (None, "verifier")
    assert "acquire fresh" not in backend.log


async def test_an_agent_that_used_up_its_time_until_the_deadline_is_to_blame_as_well(monkeypatch):
    worked = []

    class Ends(rollout._Ends):
        too_late = property(lambda self: self.agent is not None and bool(worked))

    async def work(task):
        await works(task)
        worked.append(task)

    monkeypatch.setattr(Ends, "of", lambda _: Ends(agent=1e9))
    monkeypatch.setattr(rollout, "_Ends", Ends)
    done = await roll(Plain(verify=verifies(NO, 0.0, NO)), agent=Doing(work))
    assert (done.reward, done.failure) == (0.0, None)


async def test_work_that_is_gone_is_not_verified_again():
    """A verification that empties the agent's slot, to have room, and then gives no result."""
    backend, outcomes = Slots(), ["killed", NO, 0.0]

    async def lay_out(fresh):
        await fresh.commands.run("lay out")

    async def check(_):
        return await verifies(outcomes.pop(0))(None)

    async def verify(given):
        return await given.rollout.check_afresh(lay_out, check, disturbed=str)

    done = await roll(Plain(verify=verify), agent=Doing(works), backend=backend)
    assert (done.reward, str(done.failure.kind), outcomes) == (None, "verifier", [0.0])
    assert "empty" in backend.log


async def test_a_part_of_the_work_that_is_gone_is_not_verified_again():
    async def works_twice(task):
        await works(task)
        assert await task.follow_up() is None

    hooks = {"continue": parts(NO, None, NO), "verify": verifies(0.25)}
    done = await roll(Plain(**hooks), agent=Doing(works_twice))
    assert (done.reward, done.failure) == (0.25, None)


@pytest.mark.parametrize("error", [SandboxLost("gone"), ChannelLost("silent"), SlotLost("gone")])
@pytest.mark.parametrize(
    ("isolation", "losses", "reward"),
    [("dedicated", "vv", 0.0), ("dedicated", "v", 1.0), ("user", "vvv", None), ("dedicated", "av", 1.0)],
)
async def test_a_sandbox_that_is_lost_again_where_the_agent_had_it_to_itself(error, isolation, losses, reward):
    """`losses` has the stage of each loss: of the agent, or the verification."""
    backend, left = Slots(isolation=isolation), list(losses)

    async def works_and_ends(task):
        if left[:1] == ["a"]:
            left.pop(0)
            backend.failures.append(("execute shell in /data/slot", error))
        await works(task)

    async def verify(given):
        if given.rollout.used and left[:1] == ["v"]:
            left.pop(0)
            backend.failures.append(("run look", error))
        await given.rollout.commands.run("look")
        return 1.0 if given.rollout.used else 0.5

    done = await roll(Plain(verify=verify), agent=Doing(works_and_ends), backend=backend)
    assert (done.reward, done.failure and str(done.failure.kind)) == (reward, None if reward is not None else "infra")
    if reward == 0.0:
        assert "twice in stage 'verify'" in done.details["reason"]


async def test_without_rewards_nobody_is_blamed():
    environment, backend = Plain(), Slots(isolation="dedicated")
    environment.scored = False

    async def works_and_ends(task):
        backend.failures.append(("execute shell in /data/slot", SandboxLost("gone")))
        await works(task)

    done = await roll(environment, agent=Doing(works_and_ends), backend=backend)
    assert (done.reward, str(done.failure.kind), done.infra_retries) == (None, "infra", 2)


async def test_other_failures_of_the_infrastructure_are_nobodys_fault():
    error = AcquireTimeout("no room")
    done = await roll(Plain(verify=verifies(error)), agent=Doing(works), backend=Slots(isolation="dedicated"))
    assert (done.reward, str(done.failure.kind), done.infra_retries) == (None, "infra", 2)
