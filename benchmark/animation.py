"""Puts one video, or several side by side, in an animated GIF, such as the one at the top of the README:

    python evaluate.py train_dir/DOOM --save-video         # writes train_dir/DOOM/video.mp4
    python evaluate.py train_dir/ATARI --save-video
    python benchmark/animation.py agents.gif train_dir/DOOM/video.mp4 train_dir/ATARI/video.mp4 --start 0 20

Each plays at its own speed, and all end with the shortest. The file has as many colours as fit into --megabytes.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import tyro
from PIL import Image

GAP = 8  # pixels between two videos


@dataclass
class Options:
    out: tyro.conf.Positional[Path]
    """the GIF"""
    videos: tyro.conf.Positional[tuple[Path, ...]]
    """from left to right"""
    start: tuple[float, ...] = ()
    """second of each video to begin with. Default: 0"""
    seconds: float = 12.0
    """length"""
    height: int = 240
    """pixels"""
    fps: float = 10.0
    """frames per second. A GIF counts in 1/100 s: 10, 12.5 and 20 are exact"""
    megabytes: float = 3.0
    """largest size of the file, in millions of bytes"""


def read(path: Path, start: float, options: Options) -> list[np.ndarray]:
    """The frames shown at start, start + 1 / fps, ..., in the size of the GIF."""
    with imageio.get_reader(path) as video:
        fps = video.get_meta_data()["fps"]
        first, frames = int(start * fps), []
        for i, frame in enumerate(video):
            if i >= first + options.seconds * fps:
                break
            if i >= first:
                width = round(frame.shape[1] * options.height / frame.shape[0])
                frames.append(np.asarray(Image.fromarray(frame).resize((width, options.height), Image.Resampling.BOX)))
    return [frames[int(k / options.fps * fps)] for k in range(int(len(frames) / fps * options.fps))]


def main(options: Options) -> None:
    starts = options.start or (0.0,) * len(options.videos)
    if not options.videos or len(starts) != len(options.videos):
        sys.exit(f"error: {len(options.videos)} videos and {len(starts)} numbers for --start")
    parts, gap = [], np.zeros((options.height, GAP, 3), np.uint8)
    for path, start in zip(options.videos, starts):
        parts.append(read(path, start, options))
        if not parts[-1]:
            sys.exit(f"error: {path} has nothing at the second where it should start")
    frames = [Image.fromarray(np.hstack([x for image in images for x in (gap, image)][1:])) for images in zip(*parts)]
    # One palette for all frames: what does not change from one to the next then costs nothing. Made of the colours in
    # proportion to the root of their pixels: the few pixels of a small thing count too.
    pixels = np.vstack([np.asarray(frame).reshape(-1, 3) for frame in frames[::10]]) & 0xF8
    distinct, counts = np.unique(pixels, axis=0, return_counts=True)
    sample = Image.fromarray(np.repeat(distinct, np.sqrt(counts).astype(int), axis=0)[None])
    for colours in (192, 128, 96, 64, 48, 32):
        palette = sample.quantize(colours, method=Image.Quantize.MEDIANCUT)
        images = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
        images[0].save(options.out, save_all=True, append_images=images[1:], duration=1000 / options.fps, loop=0, optimize=True)
        size = options.out.stat().st_size / 1e6
        if size <= options.megabytes:
            print(f"{options.out}: {len(frames) / options.fps:.1f} s, {images[0].width} x {images[0].height}, {colours} colours, {size:.2f} MB")
            return
    options.out.unlink()
    sys.exit(f"error: more than {options.megabytes} MB even with {colours} colours; give a smaller --height, --seconds or --fps")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
