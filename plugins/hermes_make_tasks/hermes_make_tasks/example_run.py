"""Runs one example, and prints its outcome. Sent into slots as source; standard library alone, Python >= 3.8.

Called with one JSON object on standard input (`import_path`, `code`). The last line that it prints is JSON: `error`,
the exception's type and message, or ""; `line`, the last line of the example that ran; `values`, the values of the
subjects of the last assertion.
"""

from __future__ import annotations

import ast
import json
import sys
from typing import Any

MOST = 2000


def subjects(test: ast.expr) -> list[ast.expr]:
    """Return the parts of an assertion whose values explain its failure."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return [test.left, *test.comparators]
    if isinstance(test, ast.UnaryOp):
        return subjects(test.operand)
    if isinstance(test, ast.Call):
        return [test.func.value] if isinstance(test.func, ast.Attribute) else test.args[:1]
    return [test]


class _Watched(ast.NodeTransformer):
    """Notes the values of each assertion's subjects."""

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        noted = {id(each): number for number, each in enumerate(subjects(node.test))}

        class Noting(ast.NodeTransformer):
            def visit(self, part: Any) -> Any:
                if id(part) not in noted:
                    return self.generic_visit(part)
                call = ast.Call(ast.Name("_noted", ast.Load()), [ast.Constant(noted[id(part)]), part], [])
                return ast.fix_missing_locations(ast.copy_location(call, part))

        return ast.Assert(Noting().visit(node.test), node.msg, lineno=node.lineno, col_offset=node.col_offset)


def main() -> None:
    """Run the example of standard input, and print its outcome."""
    asked = json.loads(sys.stdin.read())
    sys.path[:] = [*asked["import_path"], *(entry for entry in sys.path if entry)]
    values: dict[str, str] = {}
    told = {"error": "", "line": 0, "values": values}

    def note(number: int, value: object) -> object:
        values[str(number)] = repr(value)[:MOST]
        return value

    try:
        tree = _Watched().visit(ast.parse(asked["code"]))
        code = compile(tree, "<example>", "exec")
        exec(code, {"__name__": "example", "_noted": note})  # noqa: S102 - this is what a slot is for
    except BaseException as error:
        told["error"] = f"{type(error).__name__}: {error}"[:MOST]
        place = error.__traceback__
        while place is not None:
            if place.tb_frame.f_code.co_filename == "<example>" and place.tb_frame.f_code.co_name == "<module>":
                told["line"] = place.tb_lineno
            place = place.tb_next
    sys.stdout.write("\n" + json.dumps(told) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
