#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Says what this machine lacks for `make setup`, each with the command that mends it; exit status 1 when
# something is missing. `prerequisites.sh python` prints the Python that .venv is made with.

set -euo pipefail

PATH="${HOME:-/root}/.cargo/bin:$PATH"
RUST_MINOR_MIN=85
JAVA_MIN=17

python_found() {
  local name
  for name in python3 python3.13 python3.12 python3.11; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$name"
      return
    fi
  done
  return 1
}

rust_fits() {
  local minor
  minor="$(cargo --version 2>/dev/null | sed -nE 's/^cargo 1\.([0-9]+)\..*/\1/p')"
  [[ -n "$minor" && "$minor" -ge "$RUST_MINOR_MIN" ]] && rustc --version >/dev/null 2>&1
}

java_fits() {
  local major
  major="$("${JAVA_HOME:+$JAVA_HOME/bin/}java" -version 2>&1 | sed -nE '1s/.*version "([0-9]+).*/\1/p')"
  [[ -n "$major" && "$major" -ge "$JAVA_MIN" ]]
}

main() {
  local -a missing=()
  local python
  if python="$(python_found)"; then
    if [[ "${1:-}" == python ]]; then
      echo "$python"
      return
    fi
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
      missing+=("Python's venv module: apt-get install python3-venv")
  else
    missing+=("Python 3.11 or newer: apt-get install python3 python3-venv")
  fi
  java_fits || missing+=("Java $JAVA_MIN or newer (Spark runs on it): apt-get install default-jdk-headless")
  rust_fits || missing+=("a Rust toolchain, 1.$RUST_MINOR_MIN or newer: https://rustup.rs")
  command -v cc >/dev/null || missing+=("a C compiler and linker: apt-get install build-essential")
  if ((${#missing[@]})); then
    echo "make setup needs:" >&2
    printf '  %s\n' "${missing[@]}" >&2
    return 1
  fi
}

main "$@"
