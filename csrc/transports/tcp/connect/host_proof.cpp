#include "transports/tcp/connect/host_proof.h"

#include <sys/socket.h>

#include <cerrno>

#include "transports/abstract_address.h"
#include "transports/tcp/connect/handshake.h"

namespace pycomm {
namespace {

tcp::Fd make_socket() {
  return tcp::Fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

}  // namespace

HostProof::HostProof() : listener_(make_socket()) {
  const std::string name = "pycomm-host-" + tcp::random_secret();
  const AbstractAddress place(name);
  if (!listener_ || ::bind(listener_.get(), place.get(), place.length) != 0 ||
      ::listen(listener_.get(), SOMAXCONN) != 0) {
    return;
  }
  name_ = name;
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
