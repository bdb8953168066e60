"""How often passwords may be guessed: each network once a second, all together once a second beyond a burst.

Whoever owns an IPv6 network owns 2^64 addresses of it, so what counts is the network. Inputs: addresses, and
whether their password was right. Outputs: how long a guess has to wait, or that it is one too many.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address

GUESS_EVERY_S = 1.0
HELD_BACK_MAX_S = 5.0
NETWORKS_MAX = 1000
# Of networks that have never shown the password: so many at once, then one in each GUESS_EVERY_S.
BURST = 60
_IPV6_PREFIX_BITS = 64


def network_of(client: str) -> str:
    """Return what shares one limit: an IPv4 address, or the /64 that an IPv6 address is in."""
    try:
        address = ip_address(client.partition("%")[0])
    except ValueError:  # a server on a Unix socket has no addresses
        return client
    if isinstance(address, IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    rest_bits = address.max_prefixlen - _IPV6_PREFIX_BITS
    return f"{IPv6Address(int(address) >> rest_bits << rest_bits)}/{_IPV6_PREFIX_BITS}"


@dataclass(kw_only=True)
class GuessLimit:
    """Lets a network that got the password wrong guess once a second; who got it right never waits.

    A guess is held back before it is looked at, and only some seconds: what comes faster is refused,
    so that neither the time nor the number of waiting requests grows. All networks that have not shown the
    password share one more bound, so that many of them together guess no faster.
    """

    next_s: dict[str, float] = field(default_factory=dict)
    trusted: dict[str, None] = field(default_factory=dict)
    guesses_left: float = BURST
    filled_at_s: float = 0.0

    def wait_s(self, client: str, *, now_s: float) -> float | None:
        """Return how long this guess has to wait, None for one too many."""
        network = network_of(client)
        if network in self.next_s:
            wait_s = max(0.0, self.next_s[network] - now_s)
            if wait_s > HELD_BACK_MAX_S:
                return None
        else:
            wait_s = 0.0
        if network not in self.trusted and not self._taken(now_s):
            return None
        if network in self.next_s:
            self.next_s[network] = now_s + wait_s + GUESS_EVERY_S
        return wait_s

    def _taken(self, now_s: float) -> bool:
        """Take one of the guesses that all strangers share, if one is left."""
        filled = self.guesses_left + (now_s - self.filled_at_s) / GUESS_EVERY_S
        self.guesses_left, self.filled_at_s = min(float(BURST), filled), now_s
        if self.guesses_left < 1:
            return False
        self.guesses_left -= 1
        return True

    def wrong(self, client: str, *, now_s: float) -> None:
        """Remember the network; the one that came first is forgotten when there are many."""
        network = network_of(client)
        self.trusted.pop(network, None)
        if network not in self.next_s and len(self.next_s) >= NETWORKS_MAX:
            del self.next_s[next(iter(self.next_s))]
        self.next_s.setdefault(network, now_s + GUESS_EVERY_S)

    def right(self, client: str) -> None:
        """Forget what was wrong before; a network that knows the password shares no bound with strangers."""
        network = network_of(client)
        self.next_s.pop(network, None)
        if network not in self.trusted and len(self.trusted) >= NETWORKS_MAX:
            del self.trusted[next(iter(self.trusted))]
        self.trusted[network] = None
