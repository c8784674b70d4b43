# What rates.sh and learning.sh begin with; sourced, with their arguments: NAME [FOLDER [FLAGS]]. Without a known NAME it prints the comment
# at the top of the script and the names, and ends. It leaves: name, out (FOLDER), flags, results, `run`, and the checkout as the folder.
names() { sed -n '/^# ---- names/,$s/^\([a-z_0-9]*\)() {  # \(.*\)/\1 \2/p' "$0"; }
name=${1:-}
if ! names | grep -q "^$name "; then
    case $name in '' | -h | --help) ;; *) printf 'error: there is no %s here\n\n' "$name" >&2 ;; esac
    sed -n '2,/^# NAME/s/^# \?//p' "$0" >&2
    names | while read -r known text; do printf '    %-20s%s\n' "$known" "$text" >&2; done
    exit 2
fi
out=$(realpath -m "${2:-runs/$(basename "$0" .sh)_$name}") flags=("${@:3}")
for variable in SF_PYTHON CLEANRL CLEANRL_PYTHON SB3_PYTHON PUFFERLIB_PYTHON; do
    case $variable:${!variable:-} in   # a python without a slash is looked for on the PATH
    CLEANRL:?* | *:*/*) export "$variable=$(realpath -s "${!variable}")" ;;   # -s: a virtual environment's python is a link
    esac
done
results=$(realpath -m "${RESULTS:-$(dirname "$0")/results}")
cd "$(dirname "$0")/.."

run() {  # COMMAND
    printf '+%s\n' "$(printf ' %q' "$@")"
    [ -n "${DRY_RUN:-}" ] || "$@"
}
