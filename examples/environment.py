"""An environment of your own in one file, and `validate`, which shows that its check is sound."""

import asyncio
from collections.abc import Sequence

from hermes_core import CommandError, Environment, Item, Registrar, RolloutHandle, Runtime, hookimpl, validate


class Primes(Environment):
    """Write the primes below a limit to a file."""

    name = "primes"

    def items(self) -> Sequence[Item]:
        return [{"id": f"below-{limit}", "limit": limit} for limit in (10, 30)]

    def format_prompt(self, item: Item) -> str:
        return f"Write all primes below {item['limit']} to primes.txt, one on each line."

    @hookimpl
    async def verify_and_score_trajectory(self, item: Item, rollout: RolloutHandle) -> tuple[float, dict[str, str]]:
        limit = item["limit"]
        primes = [n for n in range(2, limit) if all(n % k for k in range(2, n))]
        try:
            answer = await rollout.commands.read_file("primes.txt", limit=10_000)
        except CommandError as error:  # what the agent left can be missing, huge, or no text
            return 0.0, {"reason": error.message}
        return float(answer.data.decode(errors="replace").split() == [str(n) for n in primes]), {}

    @hookimpl
    async def solve_trajectory(self, item: Item, rollout: RolloutHandle) -> None:
        await rollout.commands.run(f"seq 2 {item['limit'] - 1} | factor | awk 'NF == 2 {{ print $2 }}' > primes.txt")


class Plugin:
    """What an entry point of the group `hermes_core` names in a package."""

    @hookimpl
    def hermes_register_environments(self, registry: Registrar) -> None:
        registry.add("primes", Primes, summary="Find primes")


async def main() -> None:
    async with Runtime(plugins=[Plugin()]) as runtime:
        outcome = await validate(runtime, "primes", repeat=2)
    print("sound" if outcome.sound else outcome.to_dict())


asyncio.run(main())
