"""The exponentials of the kernels against double precision, in a program of their own: logits would hide an error."""

from __future__ import annotations

import math
import os
import shlex
import subprocess

import pytest

from tests.native.compiled import DIALECTS, ROOT, build_hook, pytestmark

__all__ = ["pytestmark"]
PROGRAM = r"""
#include "vec.h"
#include <cstdio>
#include <limits>
using namespace HR_ISA;
constexpr int N = POWERS;
static void powers(const float* from, float* to) {
  V x[N];
  for (int i = 0; i < N; i++) x[i] = load(from + 16 * i);
  powers_of_2<N>(x);
  for (int i = 0; i < N; i++) store(to + 16 * i, x[i]);
}
int main() {
  const float inf = std::numeric_limits<float>::infinity(), none = std::numeric_limits<float>::quiet_NaN();
  double of_2 = 0, of_e = 0;
  float x[16 * N], y[16 * N];
  for (int at = 0; at < 200000; at += 16 * N) {
    for (int i = 0; i < 16 * N; i++) x[i] = -100.0f * (float)(at + i) / 200100.0f;
    powers(x, y);
    for (int i = 0; i < 16 * N; i++) of_2 = std::fmax(of_2, std::fabs(y[i] / std::exp2((double)x[i]) - 1));
    for (int i = 0; i < N; i++) store(y + 16 * i, exp(load(x + 16 * i)));
    for (int i = 0; i < 16 * N; i++)
      if (x[i] > -87) of_e = std::fmax(of_e, std::fabs(y[i] / std::exp((double)x[i]) - 1));
  }
  for (float& each : x) each = 0;
  x[1] = -1e38f, x[2] = -inf, x[3] = none;
  powers(x, y);
  std::printf("%.9g %.9g %.9g %.9g %.9g %.9g\n", of_2, of_e, y[0], y[1], y[2], y[3]);
}
"""


@pytest.mark.parametrize("dialect", DIALECTS)
def test_powers_are_as_near_as_they_say(tmp_path, dialect):
    source, program = tmp_path / "powers.cpp", tmp_path / "powers"
    source.write_text(PROGRAM)
    hook = build_hook()
    names = ("-DHR_ISA=kernels", f"-DHR_{dialect.upper()}", f"-I{ROOT / hook.NATIVE / 'src'}")
    flags = (*hook.FLAGS.split(), *hook.X86.get(dialect, "").split(), "-Wno-unused-function")
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    # Where this runs with a library put before all others, the compiler is not to have it.
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    subprocess.run([*compiler, *flags, *names, str(source), "-o", str(program)], check=True, env=env)
    said = subprocess.run([str(program)], check=True, capture_output=True, text=True, env=env).stdout
    of_2, of_e, one, *least, none = map(float, said.split())

    assert of_2 < 5e-7
    assert of_e < 2.5e-7  # 2 units in the last place
    assert one == 1
    assert least == pytest.approx([2.0**-100] * 2, rel=1e-8)
    assert math.isnan(none)
