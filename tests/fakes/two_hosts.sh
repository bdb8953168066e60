# A machine of two hosts with a cable, in the network namespace that it is run in.
set -eu
mount -t tmpfs none /run
for n in 0 1; do
  ip netns add "host$n"
  ip -n "host$n" link set lo up
done
ip link add cable0 netns host0 type veth peer name cable1 netns host1
for n in 0 1; do
  ip -n "host$n" address add "10.77.0.$((n + 1))/24" dev "cable$n"
  ip -n "host$n" link set "cable$n" up
done
