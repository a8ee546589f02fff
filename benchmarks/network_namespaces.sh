#!/usr/bin/env bash
# A three-site federation whose sites sit behind firewalls: every participant in a network namespace of its own, nothing
# may come in to a site, and nothing may go out but TCP to the server's one port. Trains to the end, tries to break in
# and out meanwhile, and compares the model with a simulation of the same experiment.
#
#   sudo PATH="$PATH" benchmarks/network_namespaces.sh [FOLDER]
#
# Needs root, iproute2 and nftables. Changes nothing outside its namespaces (po-*, /etc/netns/po-*) and FOLDER, which
# must be new; removes the namespaces and stops what it started, also when it fails. May be run again at any time.
# Exits with an error if anything gets through that must not.
set -euo pipefail

SITES=(north east south)
HOST=federation.test
PORT=8002
SERVER_ADDRESS=192.0.2.1 # addresses of RFC 5737, which are unused
declare -A ADDRESS=([north]=192.0.2.11 [east]=192.0.2.12 [south]=192.0.2.13)
OPEN_DOOR=8080 # something listens here at every participant, so that only the firewall stands in the way
# Python's own web server would ask for a name, and be counted.
LISTEN="import socket; s = socket.create_server(('0.0.0.0', $OPEN_DOOR))
while True: s.accept()[0].close()"
PROCESSES=()

say() { printf '\n== %s\n' "$*"; }
within() { ip netns exec "po-$1" "${@:2}"; }
fail() { echo "FAILED: $*" >&2 && exit 1; }

remove_namespaces() {
    local name
    for name in server "${SITES[@]}"; do
        # What a run that was killed left behind.
        ip netns pids "po-$name" 2>/dev/null | xargs --no-run-if-empty kill -9 2>/dev/null || true
        ip netns delete "po-$name" 2>/dev/null || true
        rm -rf "/etc/netns/po-$name"
    done
    rmdir /etc/netns 2>/dev/null || true
}

clean_up() {
    local process
    for process in "${PROCESSES[@]}"; do kill "$process" 2>/dev/null || true; done
    for process in "${PROCESSES[@]}"; do wait "$process" 2>/dev/null || true; done
    remove_namespaces
}

# -- network ---------------------------------------------------------------------------------------------------------

make_namespace() { # NAME
    ip netns add "po-$1"
    within "$1" sysctl -qw net.ipv6.conf.all.disable_ipv6=1 net.ipv6.conf.default.disable_ipv6=1
    within "$1" ip link set lo up
    mkdir -p "/etc/netns/po-$1"
    printf '127.0.0.1 localhost\n%s %s\n' "$SERVER_ADDRESS" "$HOST" >"/etc/netns/po-$1/hosts"
    # Outside, so that a question for any other name is a packet that the firewall counts.
    echo "nameserver 203.0.113.53" >"/etc/netns/po-$1/resolv.conf"
}

make_network() {
    local name
    make_namespace server
    within server ip link add wire type bridge
    within server ip address add "$SERVER_ADDRESS/24" dev wire
    within server ip link set wire up
    for name in "${SITES[@]}"; do
        make_namespace "$name"
        ip link add "po-$name" type veth peer name out netns "po-$name"
        ip link set "po-$name" netns po-server
        within server ip link set "po-$name" master wire up
        within "$name" ip address add "${ADDRESS[$name]}/24" dev out
        within "$name" ip link set out up
        within "$name" ip route add default via "$SERVER_ADDRESS"
    done
}

site_firewall() { # what a hospital's firewall does
    cat <<RULES
table inet hospital {
    counter to_server {}
    counter other_out {}
    counter in_refused {}
    chain incoming {
        type filter hook input priority 0; policy drop;
        iifname "lo" accept
        ct state established accept
        counter name in_refused drop
    }
    chain outgoing {
        type filter hook output priority 0; policy drop;
        oifname "lo" accept
        ip daddr $SERVER_ADDRESS tcp dport $PORT counter name to_server accept
        counter name other_out drop
    }
}
RULES
}

counted() { # SITE COUNTER: packets
    within "$1" nft -j list counter inet hospital "$2" | grep -o '"packets": *[0-9]*' | grep -o '[0-9]*$'
}

# -- attempts --------------------------------------------------------------------------------------------------------

must_not_connect() { # FROM ADDRESS PORT WORDS
    if within "$1" timeout 3 bash -c "exec 3<>/dev/tcp/$2/$3" 2>/dev/null; then fail "$4: connected"; fi
    echo "$4: no connection"
}

try_to_break_in_and_out() {
    local before_in before_out name
    before_in=$(counted north in_refused) before_out=$(counted north other_out)
    echo "listening at north: $(within north ss -Hltn | awk '{print $4}' | sort | tr '\n' ' ')"
    for name in server north; do
        within "$name" bash -c "exec 3<>/dev/tcp/127.0.0.1/$OPEN_DOOR" || fail "nothing listens at $name:$OPEN_DOOR"
    done
    must_not_connect server "${ADDRESS[north]}" "$OPEN_DOOR" "server → north:$OPEN_DOOR, where something listens"
    must_not_connect east "${ADDRESS[north]}" "$OPEN_DOOR" "east → north:$OPEN_DOOR"
    must_not_connect north "$SERVER_ADDRESS" "$OPEN_DOOR" "north → server:$OPEN_DOOR, where something listens"
    must_not_connect north "${ADDRESS[east]}" "$OPEN_DOOR" "north → east:$OPEN_DOOR"
    must_not_connect north 203.0.113.1 443 "north → 203.0.113.1:443, the world"
    within north bash -c 'echo >/dev/udp/203.0.113.53/53' 2>/dev/null || true
    echo "packets refused on their way into north: $(($(counted north in_refused) - before_in))"
    echo "packets of north that were dropped:      $(($(counted north other_out) - before_out))"
    [ "$(counted north in_refused)" -gt "$before_in" ] || fail "north's firewall saw no packet"
    [ "$(counted north other_out)" -gt "$before_out" ] || fail "north's firewall dropped nothing"
}

# -- federation ------------------------------------------------------------------------------------------------------

make_federation() { # in the current folder: data, experiment, kits
    cat >tiny.yaml <<YAML
name: namespaces
vocabulary: [liver, spleen, kidney_left, kidney_right]
phantom:
  sites:
    - {name: north, annotated: [liver], cases: 5, spacing_mm: [12, 12, 12]}
    - {name: east, annotated: [spleen], cases: 5, spacing_mm: [11, 11, 13]}
    - {name: south, annotated: [kidney], cases: 5, spacing_mm: [12, 12, 12]}
network: {features: [4, 8, 8]}
training:
  {rounds: 4, local_steps: 3, validate_every: 2, overlap: 0.0, sampling: {patch_size: [16, 16, 16], batch_size: 2}}
hardware: {device: cpu, threads: 1}
YAML
    cat >federation.yaml <<YAML
name: namespaces
experiment: data/experiment.yaml
server: {host: $HOST, port: $PORT}
sites: [$(IFS=,; echo "${SITES[*]}")]
rounds: {per_segment: 2}
YAML
    panorgan phantom data --experiment tiny.yaml 2>/dev/null
    panorgan federation init --out kits >/dev/null
    local name
    for name in "${SITES[@]}"; do
        sed -i "s|^  folder: .*|  folder: $PWD/data/$name|; s|device: auto|device: cpu|; s|# threads: 8|threads: 1|" \
            "kits/sites/$name/local/site.yaml"
        panorgan federation approve "kits/sites/$name" >/dev/null
    done
}

start() { # NAME COMMAND...: in its namespace, in the background; its output goes to NAME.out
    # Not through a function: $! must be the command itself, which ip becomes, and no shell around it.
    ip netns exec "po-$1" "${@:2}" >>"$1.out" 2>&1 &
    PROCESSES+=($!)
}

run_federation() {
    local name driver
    start server panorgan federation server kits/server
    for name in "${SITES[@]}"; do start "$name" panorgan federation site "kits/sites/$name"; done
    for name in server "${SITES[@]}"; do start "$name" python3 -c "$LISTEN"; done
    ip netns exec po-server panorgan federation start kits/server >driver.out 2>&1 &
    driver=$!
    PROCESSES+=("$driver")
    for _ in $(seq 180); do
        if grep -q 'round 1/' driver.out || ! kill -0 "$driver" 2>/dev/null; then break; fi
        sleep 1
    done
    say "While it runs: into a site, and out of it"
    try_to_break_in_and_out
    wait "$driver" || { cat driver.out && fail "the run did not end well"; }
    say "The run, as 'panorgan federation start' shows it"
    cat driver.out
}

main() {
    [ "$(id -u)" = 0 ] || fail "network namespaces need root"
    for tool in ip nft ss panorgan python3; do
        command -v "$tool" >/dev/null || fail "$tool is not on the PATH"
    done
    local name tool folder=${1:-$(mktemp -d -t namespaces-XXXX)/trial}
    [ ! -e "$folder" ] || fail "$folder is there already; give a new folder"
    mkdir -p "$folder" && cd "$folder"
    export PANORGAN_CACHE="$PWD/cache" OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE PYTHONUNBUFFERED=1
    remove_namespaces
    trap clean_up EXIT
    trap 'exit 130' INT TERM
    make_network
    for name in "${SITES[@]}"; do site_firewall | within "$name" nft -f -; done
    say "The firewall of every site"
    within north nft list table inet hospital
    make_federation >/dev/null
    say "Preflight at north, before the server runs"
    within north panorgan federation preflight kits/sites/north --no-data | grep -E 'server name|connection' || true
    run_federation
    say "What each site's firewall let out and stopped, in packets"
    for name in "${SITES[@]}"; do
        printf '%-6s to the server %6s   other outbound, dropped %3s   inbound, refused %3s\n' "$name" \
            "$(counted "$name" to_server)" "$(counted "$name" other_out)" "$(counted "$name" in_refused)"
    done
    say "The model: at the server, at each site, and from a simulation of the same experiment"
    panorgan train data/experiment.yaml --run simulated >/dev/null 2>&1
    sha256sum simulated/model/model.safetensors kits/server/run/model/model.safetensors kits/sites/*/model/model.safetensors
    [ "$(sha256sum simulated/model/*.safetensors kits/server/run/model/*.safetensors kits/sites/*/model/*.safetensors |
        cut -d' ' -f1 | sort -u | wc -l)" = 1 ] || fail "the models differ"
    echo "All five are the same bits. Everything is in $folder."
}

main "$@"
