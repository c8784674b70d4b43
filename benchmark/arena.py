"""Writes a small arena for matches: one square room, so small that two players see each other nearly all the time.

    python benchmark/arena.py FILE.wad      # then train with --env-id duel --match-wad FILE.wad
"""

import json
import struct
import sys
from pathlib import Path

# Map units; a player is 32 wide. In 512, agents learned to shoot at each other from far corners, where an enemy is 5 pixels high.
SIDE = 256
DEATHMATCH_START, PLAYER_START, SHOTGUN = 11, 1, 2001  # the engine's numbers of things


def textmap() -> str:
    """The room in UDMF, the text format of ZDoom's maps."""
    corners = [(0, 0), (0, SIDE), (SIDE, SIDE), (SIDE, 0)]  # clockwise: a wall is seen from its right
    blocks = ['namespace = "zdoom";']

    def block(kind: str, **fields) -> None:
        lines = (f"  {name} = {json.dumps(value)};" for name, value in fields.items())  # text, numbers and true as in JSON
        blocks.append("\n".join([kind, "{", *lines, "}"]))

    for x, y in corners:
        block("vertex", x=float(x), y=float(y))
    for wall in range(4):
        block("linedef", v1=wall, v2=(wall + 1) % 4, sidefront=wall, blocking=True)
        block("sidedef", sector=0, texturemiddle="SHAWN2")
    block("sector", heightfloor=0, heightceiling=128, lightlevel=224, texturefloor="FLOOR4_8", textureceiling="CEIL3_5")
    near, far = 48, SIDE - 48
    starts = [(near, near, 45), (near, far, 315), (far, far, 225), (far, near, 135)]
    things = [(*place, kind) for place in starts for kind in (DEATHMATCH_START, SHOTGUN)]  # weapons stay for the next
    things.append((*starts[0], PLAYER_START))
    everywhere = dict.fromkeys(("skill1", "skill2", "skill3", "skill4", "skill5", "single", "dm", "coop"), True)
    for x, y, angle, kind in things:
        block("thing", x=float(x), y=float(y), angle=angle, type=kind, **everywhere)
    return "\n".join(blocks) + "\n"


# Pistol (weapon 1) and shotgun (2) use no ammunition (type 5). A player without any could do nothing until the game's end.
DEHACKED = """Patch File for DeHackEd v3.0
Doom version = 19
Patch format = 6

Weapon 1
Ammo type = 5

Weapon 2
Ammo type = 5
"""


def wad(lumps: list[tuple[str, bytes]]) -> bytes:
    """Doom's archive: header, contents, directory of (offset, size, name)."""
    contents, directory, header = b"", b"", struct.Struct("<4sii")
    for name, data in lumps:
        directory += struct.pack("<ii8s", header.size + len(contents), len(data), name.encode())
        contents += data
    return header.pack(b"PWAD", len(lumps), header.size + len(contents)) + contents + directory


def main(file: Path) -> None:
    lumps = [("DEHACKED", DEHACKED.encode()), ("MAP01", b""), ("TEXTMAP", textmap().encode()), ("ENDMAP", b"")]
    file.write_bytes(wad(lumps))
    print(f"wrote {file}")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
