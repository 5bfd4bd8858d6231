"""``python -m tilekern.ops.writing``: write the code of tilekern's ops, and print which files changed.

If an old file keeps its op from being imported, delete the file first.
"""

from tilekern.ops.operation import DECLARED, GENERATED, generated_file
from tilekern.ops.writing import module_of
from tilekern.warning import tell


def main() -> None:
    """Write each op's file, and delete files without an op."""
    texts = {path: module_of(op) for op in DECLARED.values() if (path := generated_file(op)) is not None}
    for path in sorted({*texts, *GENERATED.glob("*.py")}):
        before = path.read_text(encoding="utf-8") if path.exists() else None
        if path not in texts:
            path.unlink()
        elif texts[path] != before:
            path.write_text(texts[path], encoding="utf-8")
        if texts.get(path) != before:
            tell(f"{path.name}: {'deleted' if path not in texts else 'written'}")


if __name__ == "__main__":
    main()
