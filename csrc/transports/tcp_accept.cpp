// Connector: who comes. Strangers may knock at any time; those that turn out to be peers join.
#include <cerrno>

#include "core/error.h"
#include "transports/tcp_connector_parts.h"

namespace pycomm::tcp {

// How long a connection may take for its first words, which are a few small messages. Late peers
// are not hurt: they try again.
constexpr auto kGreetingLimit = std::chrono::seconds(10);
// Connections that have not authenticated; more push out the oldest.
constexpr size_t kMaxStrangers = 512;
// Without a free descriptor there is no use in looking at listeners.
constexpr auto kDeaf = Milliseconds(50);

void Connector::accept_all(const Fd& listener) {
  while (Fd fd = accept_from(listener.get())) {
    if (strangers_.size() == kMaxStrangers) strangers_.pop_front();
    strangers_.push_back(
        {std::move(fd),
         Greeting(Handshake(mesh_.secret, group_, rank_, size_, mesh_.sockets, mesh_.tls)),
         Clock::now() + kGreetingLimit});
  }
  if (errno != EMFILE && errno != ENFILE) return;
  if (!strangers_.empty()) {  // rather these than us
    strangers_.clear();
  } else if (control_ == nullptr) {
    throw Error("tcp: rank " + std::to_string(rank_) + " cannot accept connections: " +
                error_text(errno) + "; raise the limit of open files (ulimit -n)");
  }
  deaf_until_ = Clock::now() + kDeaf;
}

void Connector::serve(Stranger& stranger) {
  int error = 0;
  const auto progress = stranger.greeting.advance(stranger.fd.get(), error);
  if (progress == Greeting::Progress::waits) return;
  if (progress == Greeting::Progress::done) {
    const Hello& hello = stranger.greeting.hello();
    for (const auto& link : links_) {
      if (link->peer.rank != static_cast<int>(hello.rank)) continue;
      join(*link, hello, stranger.greeting.wire(std::move(stranger.fd)));
      break;
    }
  } else {
    note_refusal(stranger, progress == Greeting::Progress::refused);
  }
  stranger.fd.reset();
}

// For the error text of a set-up that fails. Who was refused tells more than who went away.
void Connector::note_refusal(const Stranger& stranger, bool refused) {
  refused_++;
  if (!refused && !last_refused_.empty()) return;
  const Address from = Address::remote(stranger.fd.get());
  last_refused_ = (from.size() > 0 ? from.text() : "a stranger") + ": " +
                  (refused ? stranger.greeting.problem() : "it went away during the handshake");
}

}  // namespace pycomm::tcp
