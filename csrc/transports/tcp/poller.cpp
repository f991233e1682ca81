// Poller: the epoll of a lane.
#include "transports/tcp/poller.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <utility>

#include "core/error.h"

namespace pycomm::tcp {

using Clock = std::chrono::steady_clock;

// A thread that sleeps in the kernel runs again some microseconds after its event; one that polls
// runs at once, if it has a core of its own.
constexpr auto kSpin = std::chrono::microseconds(50);

Poller::Poller(uint16_t lane, int rank, Control& control, Pacer& pacer, bool spins)
    : lane_(lane),
      rank_(rank),
      control_(control),
      pacer_(pacer),
      spins_(spins),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      doorbell_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  epoll_event event = {};
  event.events = EPOLLIN;
  epoll_event doorbell = event;
  doorbell.data.ptr = &doorbell_;
  if (!epoll_ || !doorbell_ ||
      ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, control.wait_fd(), &event) != 0 ||
      ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, doorbell_.get(), &doorbell) != 0) {
    throw_errno("tcp: cannot make an epoll");
  }
}

void Poller::watch(int fd, Readiness& readiness) {
  epoll_event event = {};
  event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  event.data.ptr = &readiness;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    throw_errno("tcp: cannot watch a connection");
  }
}

bool Poller::take_events() {
  polls_++;
  epoll_event events[64];
  const int count = ::epoll_wait(epoll_.get(), events, 64, 0);
  for (int i = 0; i < count; i++) {
    if (events[i].data.ptr == nullptr) {
      control_.poll();
      continue;
    }
    if (events[i].data.ptr == &doorbell_) {
      uint64_t rings;
      [[maybe_unused]] const ssize_t n = ::read(doorbell_.get(), &rings, sizeof rings);
      continue;
    }
    auto& readiness = *static_cast<Readiness*>(events[i].data.ptr);
    const uint32_t what = events[i].events;
    if (what & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) readiness.ends = true;
    if (what & EPOLLIN || readiness.ends) readiness.readable = true;
    if (what & (EPOLLOUT | EPOLLHUP | EPOLLERR)) readiness.writable = true;
  }
  return count > 0;
}

void Poller::poll() {
  if (take_events()) fresh_ = true;
}

void Poller::ring() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(doorbell_.get(), &one, sizeof one);
}

bool Poller::poll_locked() {
  std::lock_guard<std::mutex> lock(mutex_);
  return take_events();
}

void Poller::idle(std::chrono::microseconds limit) {
  bool spins;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (std::exchange(fresh_, false)) return;
    if (std::exchange(starved_, false)) limit = std::min(limit, pacer_.wait());
    spins = spins_ && !std::exchange(bulk_, false);
    if (take_events()) return;
  }
  const auto start = Clock::now();
  if (spins) {
    while (Clock::now() - start < std::min(limit, kSpin)) {
      if (poll_locked()) return;
    }
  }
  const auto left =
      limit - std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - start);
  if (left.count() <= 0) return;
  // This is ppoll on the epoll descriptor, because epoll_wait counts in milliseconds.
  const timespec time = {left.count() / 1000000, left.count() % 1000000 * 1000};
  pollfd wait = {epoll_.get(), POLLIN, 0};
  if (::ppoll(&wait, 1, &time, nullptr) > 0) poll_locked();
}

}  // namespace pycomm::tcp
