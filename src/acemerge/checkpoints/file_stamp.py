"""Whether a file is still the one that was opened.

Weights are memory-mapped: a file that someone changes during a merge would change the merge, and one that shrinks would end the
process (see `process.py` for what the command line does then). So every read compares the file's stamp first, and so does the
end of a merge, before anything is published.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from acemerge.errors import MergeError


@dataclass(frozen=True)
class FileStamp:
    """What the file system says about a file: it differs after any ordinary change."""

    path: Path
    size: int
    modified_ns: int
    inode: int

    @staticmethod
    def of(path: Path) -> FileStamp:
        """The stamp of a file as it is now."""
        status = path.stat()
        return FileStamp(path, status.st_size, status.st_mtime_ns, status.st_ino)

    def check(self) -> None:
        """Raise an error if the file is not the same any more."""
        try:
            now = FileStamp.of(self.path)
        except OSError as error:
            raise MergeError(f"{self.path}: cannot be read any more ({error.strerror}); {_ADVICE}") from None
        if now != self:
            how = f"from {self.size} to {now.size} bytes" if now.size != self.size else "written anew"
            raise MergeError(f"{self.path}: was changed ({how}) while it was being merged; {_ADVICE}")


_ADVICE = "nothing was published. Repeat the command when the file is whole and nobody writes to it"
