// What a rank knows of its host, and which network interface its group uses.
#pragma once
#include <string>
#include <vector>

#include "transports/tcp_socket.h"

namespace pycomm::tcp {

struct Interface {
  std::string name;  ///< "eth0"
  Address address;   ///< one that other hosts can reach, except on the loopback interface
};

/// Interfaces that are up, one entry for each address that can be published; IPv4 first.
std::vector<Interface> interfaces();

/// Equal for two processes exactly if they reach each other by the loopback interface: same running
/// kernel, same network namespace.
std::string host_id();

/// The CPUs on which this process may run: a '1' or '0' for each.
std::string cpu_mask();

struct InterfaceWish {
  /// An address, or names as NCCL_SOCKET_IFNAME has them: prefixes joined by ',' of which one must
  /// match ("eth,ib"), '=' before the list for whole names, and '^' before those that must not
  /// match ("^lo,docker", "eth,^eth7"). Empty: choose.
  std::string names;
  /// Where the store is, empty if unknown: the interface that routes there is a good choice.
  std::string store_host;
  /// All ranks are on this host: the loopback interface is the best choice, and otherwise none.
  bool one_host = false;
};

/// Throws Error with the list of interfaces if the wish fits none.
Interface choose_interface(const InterfaceWish& wish);
/// The choice among given candidates; for tests.
PYCOMM_API Interface choose_interface(const InterfaceWish& wish,
                                      const std::vector<Interface>& candidates);

}  // namespace pycomm::tcp
