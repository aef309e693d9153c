"""Commands in a slot: what they are given (input, arguments, environment, directory), and what is refused."""

from __future__ import annotations

import os
import secrets

import pytest
from hermes_testing.conformance.kit import Kit
from hermes_testing.conformance.waiting import expect_refusal, within

from hermes_core.errors import CommandError

pytestmark = pytest.mark.asyncio(loop_scope="module")

HARMLESS = {
    *("PATH", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TERM", "TZ"),
    *("SHLVL", "PWD", "OLDPWD", "_", "USER", "LOGNAME", "HOME"),
}
"""Variables that may have the driver's value by chance, or by the system's default."""


async def test_no_input_is_an_empty_one(kit: Kit) -> None:
    """A command that reads its input where none was given gets its end at once."""
    result = await within(20, (await kit.slot()).run("wc -c; cat"), "a command that reads without input")
    assert result.text.strip() == "0", "bytes read"


async def test_fifty_megabytes_of_input(kit: Kit) -> None:
    """50 MB of input arrive, and come back as output."""
    data = os.urandom(1_000_000) * 50
    result = await (await kit.slot()).run("cat", stdin=data, output_limit=64 << 20)
    if result.stdout != data:
        pytest.fail(f"of {len(data)} bytes of input, {len(result.stdout)} came back, or others")


async def test_input_that_is_not_read(kit: Kit) -> None:
    """A command that does not read its input ends all the same, with its own status."""
    slot = await kit.slot()
    for size in (10, 5_000_000):
        result = await within(30, slot.run("head -c 1; exit 5", stdin=b"x" * size), f"{size} bytes that are not read")
        assert (result.exit_code, result.stdout) == (5, b"x"), f"with {size} bytes of input"
        result = await within(30, slot.run("exec 0<&-; sleep 0.3; exit 6", stdin=b"x" * size), "a closed input")
        assert result.exit_code == 6, f"the status of what has closed its input of {size} bytes"


async def test_a_script_of_a_megabyte(kit: Kit) -> None:
    """A script longer than an argument can be runs as a short one does, with its input."""
    filler = "# " + "x" * 1000 + "\n"
    script = f'echo first\n{filler * 1000}read -r line; echo "$line"; exit 7'
    result = await (await kit.slot()).run(script, stdin=b"from input\n")
    assert (result.text, result.exit_code) == ("first\nfrom input\n", 7), "a script of 1 MB"


async def test_a_megabyte_of_arguments(kit: Kit) -> None:
    """Arguments of 1 MB in all arrive."""
    words = [f"{number:099d}" for number in range(10_000)]
    result = await (await kit.slot()).run(["printf", "%s\\n", *words], output_limit=2 << 20)
    if result.text.split() != words:
        pytest.fail(f"{len(result.text.split())} of {len(words)} arguments arrived, or others")


async def test_arguments_are_not_parsed(kit: Kit) -> None:
    """A sequence runs as it is: no shell reads it."""
    words = ["", " ", "a b", "$HOME", "`id`", "'", '"', "\\", "\n", "*", "-n", "€", "ü" * 100]
    result = await (await kit.slot()).run(["printf", "%s\\0", *words])
    assert result.stdout == b"".join(w.encode() + b"\0" for w in words), "the arguments"


async def test_arguments_of_any_bytes(kit: Kit) -> None:
    """Bytes that are no UTF-8 arrive as they are; without Python they may be refused instead, never changed."""
    slot = await kit.slot()
    try:
        result = await slot.run(["printf", "%s", "a\udcffz"])
    except CommandError:
        assert kit.direct, "an argument that is no UTF-8 was refused"
        return
    assert result.stdout == b"a\xffz", "the argument"


async def test_an_argument_that_is_too_long(kit: Kit) -> None:
    """An argument that the kernel refuses is an error of the command, and the slot goes on."""
    slot = await kit.slot()
    try:
        result = await slot.run(["true", "x" * 200_000])
        assert not result.ok, "an argument of 200,000 bytes was taken, which Linux can't"
    except Exception as error:
        assert type(error).__name__ == "CommandError", "the error's kind"
    assert (await slot.run("echo fine")).text == "fine\n", "the next command"


async def test_variables_of_the_profile(kit: Kit) -> None:
    """`env_vars` of the profile are in every command, and a command's own come before them."""
    async with kit.tools(env_vars={"FROM_PROFILE": "a b", "OTHER": "x"}) as tools, tools.lease() as slot:
        result = await tools.commands(slot).run('echo "$FROM_PROFILE|$OTHER"', env={"OTHER": "y"})
        assert result.text == "a b|y\n", "the variables"


async def test_a_directory_that_is_none(kit: Kit) -> None:
    """A `cwd` that is missing or no directory is refused with its code, and named, before a program is looked for."""
    slot = await kit.slot()
    await slot.write_file("dir/file", b"")
    for cwd, code in (("missing", "cwd_not_found"), ("dir/file", "cwd_not_a_directory")):
        for attempt in (slot.run("true", cwd=cwd), slot.start(["no-such-program"], cwd=cwd)):
            with pytest.raises(CommandError) as raised:
                await attempt
            error = raised.value
            assert (error.code, cwd in error.message) == (code, True), "its code, and that the directory is named"


async def test_no_login_files(kit: Kit) -> None:
    """No login file is read: not .profile, .bashrc or .bash_profile of the slot's home, nor what BASH_ENV names."""
    slot = await kit.slot()
    mark = secrets.token_hex(8)
    await slot.run(f'for f in .profile .bashrc .bash_profile .bash_login; do echo "echo {mark}" >"$HOME/$f"; done')
    result = await slot.run("echo only")
    assert (result.text, result.stderr) == ("only\n", b""), "the output of a command"


async def test_no_descriptor_is_inherited(kit: Kit) -> None:
    """A command has its standard streams, and no other descriptor: nothing of ours to forge results with."""
    script = "n=0; while [ $n -lt 100 ]; do [ -e /proc/$$/fd/$n ] && echo $n; n=$((n + 1)); done; true"
    result = await (await kit.slot()).run(script)
    extra = set(result.text.split()) - {"0", "1", "2"}
    if kit.direct:  # its `sh` may keep some of its own, which lead nowhere
        return
    assert extra == set(), "descriptors beyond the standard streams"


async def test_what_can_not_be_a_command(kit: Kit) -> None:
    """NUL bytes, what is no text, names of variables that are none and empty commands are refused; the slot goes on."""
    slot = await kit.slot()
    for command in ("a\0b", ["a\0b"], "\ud800", ["\ud800"], []):
        await expect_refusal(slot.run(command), "invalid")
    for env in ({"A": "x\0y"}, {"A": "\ud800"}):
        await expect_refusal(slot.run("true", env=env), "invalid")
    for name in ("A=B", ""):
        await expect_refusal(slot.run("true", env={name: "x"}), "invalid", "spawn")
    assert (await slot.run("echo fine")).text == "fine\n", "the next command"


async def test_a_missing_program(kit: Kit) -> None:
    """A program that is not there is status 127 in a shell; as a sequence it is refused, also in the background."""
    slot = await kit.slot()
    await slot.run("mkdir directory; echo '#!/bin/sh' >script")
    assert (await slot.run("no-such-program")).exit_code == 127, "the shell's status"
    missing, closed = (["no-such-program"], ["./nothing"], [""]), (["./directory"], ["./script"])
    for programs, code in ((missing, "not_found"), (closed, "permission")):
        for program in programs:
            await expect_refusal(slot.run(program), code)
            await expect_refusal(slot.start(program), code)
    assert list(await slot.processes()) == [], "background processes"
