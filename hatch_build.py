"""Links the root folders into src/headrace/ (git-ignored), so that an editable install sees one package.

Receives the kind of build from hatchling. A wheel needs no links: pyproject.toml lists the folders under force-include.
"""

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDERS = ("core", "hooks", "plugins", "server")


class LinkFolders(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":
            return
        package = Path(self.root, "src", "headrace")
        for name in FOLDERS:
            link, target = package / name, Path(self.root, name)
            if os.path.lexists(link):
                continue
            try:
                link.symlink_to(os.path.relpath(target, package), target_is_directory=True)
            except OSError:
                # Windows without developer mode forbids symlinks and allows junctions. Elsewhere this import fails, and
                # the error it chains to says why the link could not be made.
                import _winapi

                _winapi.CreateJunction(str(target), str(link))
