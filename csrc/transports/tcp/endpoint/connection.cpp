// Client side of endpoints.
#include "transports/tcp/endpoint/connection.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#include "transports/seal.h"
#include "transports/tcp/connect/greeting.h"

namespace pycomm::tcp {
namespace {

// How often a wait looks whether this rank is to stop.
constexpr Milliseconds kInterruptCheck(50);
// Time that a process has to answer before nothing is known of it.
constexpr Milliseconds kSign(1000);
// Pauses before one who has proven nothing is asked again.
constexpr Milliseconds kFirstPause(10), kLastPause(kInterruptCheck);

}  // namespace

EndpointConnection::EndpointConnection(const Handle& to, const std::string& given,
                                       const Deadline& deadline, std::function<void()> interrupt)
    : where_(to.where()), interrupt_(std::move(interrupt)) {
  const std::string& secret = to.secret.empty() ? given : to.secret;
  for (Milliseconds pause = kFirstPause;; pause = std::min(2 * pause, kLastPause)) {
    const std::string problem = greet(call(to, deadline), to, secret, deadline);
    if (problem.empty()) return;
    if (deadline.left() <= pause) {
      throw Unproven("the process at " + where_ + " is not the one of the handle (" + problem +
                     "); exchange the handles anew");
    }
    std::this_thread::sleep_for(pause);
    if (interrupt_) interrupt_();
  }
}

Fd EndpointConnection::call(const Handle& to, const Deadline& deadline) {
  std::string problem;
  for (const Address& address : to.addresses) {
    const auto start = Deadline::Clock::now();
    int error = 0;
    Fd fd = connect_to(address, nullptr, error);
    if (!fd) throw Error("no connection to " + where_ + ": " + error_text(error));
    if (error == 0) {
      wait(fd.get(), POLLOUT, deadline);
      error = pending_error(fd.get());
    }
    if (error == 0) {
      round_trip_ =
          std::chrono::duration_cast<std::chrono::microseconds>(Deadline::Clock::now() - start);
      return fd;
    }
    problem = error_text(error);
    if (error == ECONNREFUSED) continue;
    if (&address == &to.addresses.back()) throw Error("no way to " + where_ + ": " + problem);
  }
  throw Refused("nobody listens at " + where_ + " (" + problem + ")");
}

std::string EndpointConnection::greet(Fd fd, const Handle& to, const std::string& secret,
                                      const Deadline& deadline) {
  Hello hello;  // as from rank 1 of 2 to rank 0, on its control connection
  hello.size = 2;
  hello.rank = 1;
  hello.sockets = 1;
  hello.lane = kControl;
  hello.tls = to.tls ? 1 : 0;
  Greeting greeting(Handshake(secret, "endpoint " + to.id, hello));
  for (;;) {
    int error = 0;
    switch (greeting.advance(fd.get(), error)) {
      case Greeting::Progress::waits:
        wait(fd.get(), greeting.events(), deadline);
        continue;
      case Greeting::Progress::done:
        socket_ = greeting.sock(std::move(fd));
        return "";
      case Greeting::Progress::refused:
        return greeting.problem();
      case Greeting::Progress::closed:
        return "it closed the connection" + (error != 0 ? ": " + error_text(error) : "");
    }
  }
}

void EndpointConnection::wait(int fd, short events, const Deadline& deadline) const {
  for (;;) {
    pollfd wanted{fd, events, 0};
    const auto pause = std::min<Milliseconds>(kInterruptCheck, deadline.left() + Milliseconds(1));
    if (::poll(&wanted, 1, static_cast<int>(pause.count())) > 0) return;
    if (deadline.expired()) {
      throw Timeout(where_ + " does not answer within " + std::to_string(deadline.limit().count()) +
                    " ms");
    }
    if (interrupt_) interrupt_();
  }
}

void EndpointConnection::send(const std::string& message, const Deadline& deadline) {
  for (size_t done = 0; done < message.size();) {
    const ssize_t n = socket_.send(message.data() + done, message.size() - done);
    if (n >= 0) {
      done += static_cast<size_t>(n);
    } else if (errno == EAGAIN || errno == EINTR) {
      wait(socket_.get(), POLLOUT, deadline);
    } else {
      throw Refused("the connection with " + where_ + " is gone: " + error_text(errno));
    }
  }
}

std::string EndpointConnection::receive(const Deadline& deadline) {
  std::string message;
  while (!take_message(arrived_, message)) {
    char buffer[4096];
    const ssize_t n = socket_.receive(buffer, sizeof buffer);
    if (n > 0) {
      arrived_.append(buffer, static_cast<size_t>(n));
    } else if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
      wait(socket_.get(), POLLIN, deadline);
    } else {
      throw Refused("the connection with " + where_ + " is gone");
    }
  }
  return message;
}

bool is_gone(const Handle& handle, const std::string& secret, std::function<void()> interrupt) {
  try {
    EndpointConnection(handle, key_of_secret(secret), Deadline::after(kSign), std::move(interrupt));
  } catch (const Refused&) {
    return true;
  } catch (const Error&) {  // it does not answer, or there is no way to it
  }
  return false;
}

}  // namespace pycomm::tcp
