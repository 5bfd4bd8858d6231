"""``python -m tilekern.ops.writing``: writes the code of tilekern's ops anew, and says which files changed.

Where a file is so old that its op cannot be imported any more, delete it.
"""

from tilekern.ops.operation import DECLARED, GENERATED, generated_file
from tilekern.ops.writing import module_of
from tilekern.warning import tell


def main() -> None:
    """Write each op's file, and delete those of ops that are gone."""
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
