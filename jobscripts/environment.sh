# Sourced by the scripts beside it: makes the virtual environments inside the clone.
# shellcheck shell=bash

clone="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# Prints the command of a Python that will do: $PYTHON if set, otherwise the first on the path.
find_python() {
    local candidate candidates=(python3 python3.13 python3.12 python3.11 python3.10)
    [[ -z "${PYTHON:-}" ]] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        # Run, not only found: the command may be a version manager's stand-in. ensurepip is
        # what Debian leaves out until python3-venv is installed.
        if "$candidate" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 10))' \
            >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    echo "No Python 3.10 or newer with its venv module among: ${candidates[*]}." \
        "Install one (Debian, Ubuntu: python3-venv too) or set PYTHON." >&2
    return 1
}

# ensure_environment FOLDER EXTRAS: FOLDER (in the clone) has mpihpo, editable, with EXTRAS.
# Quick when nothing that decides about the installation has changed since the last time.
ensure_environment() {
    local folder="$clone/$1" extras="$2" python stamp facts
    stamp="$folder/installed-$extras"
    facts="$clone $(cd "$clone" && cksum setup.cfg pyproject.toml constraints.txt)"
    if [[ -x "$folder/bin/python" && -f "$stamp" && "$(cat "$stamp")" == "$facts" ]]; then
        return
    fi
    python="$(find_python)"
    echo "Installing mpihpo[$extras] into $folder (minutes the first time)" >&2
    # A folder whose Python does not start is a left-over of a Python that is gone.
    if ! "$folder/bin/python" -c 'import pip' >/dev/null 2>&1; then
        "$python" -m venv --clear "$folder"
    fi
    # On Linux x86_64 the package index has torch with CUDA, several GB. Where only CPUs are to be
    # used, point pip at PyTorch's index of CPU builds first, by PIP_INDEX_URL or pip's settings.
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint "$clone/constraints.txt" --editable "${clone}[$extras]"
    echo "$facts" >"$stamp"
}

# Prints the threads per rank when RANKS ranks share this machine's cores.
threads_per_rank() {
    local ranks="$1" threads
    threads=$(($(getconf _NPROCESSORS_ONLN) / ranks))
    echo $((threads > 0 ? threads : 1))
}
