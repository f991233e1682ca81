#include "transports/tcp/connect/host_proof.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>

#include "transports/abstract_address.h"
#include "transports/seal.h"

namespace pycomm {
namespace {

tcp::Fd make_socket() {
  return tcp::Fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

}  // namespace

HostProof::HostProof() : listener_(make_socket()) {
  const std::string name = "pycomm-host-" + random_secret();
  const AbstractAddress place(name);
  if (!listener_ || ::bind(listener_.get(), place.get(), place.length) != 0 ||
      ::listen(listener_.get(), SOMAXCONN) != 0) {
    return;
  }
  name_ = name;
}

bool HostProof::is_ours(const std::string& name) {
  const AbstractAddress place(name);
  const tcp::Fd socket = make_socket();
  ucred owner = {};
  socklen_t length = sizeof owner;
  return socket && ::connect(socket.get(), place.get(), place.length) == 0 &&
         ::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &owner, &length) == 0 &&
         owner.uid == ::geteuid();
}

HostProof::State HostProof::probe(const std::string& name) {
  const AbstractAddress place(name);
  const tcp::Fd socket = make_socket();
  if (!socket) return State::unknown;  // no descriptor is left: not the other's fault
  if (::connect(socket.get(), place.get(), place.length) == 0) return State::open;
  // Nobody takes connections in; many may wait already.
  if (errno == EAGAIN) return State::open;
  return errno == ECONNREFUSED ? State::closed : State::unknown;
}

}  // namespace pycomm
