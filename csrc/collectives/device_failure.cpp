// How a group of ranks on GPUs fails: what kernels complain of becomes an exception, and every rank
// learns the reason.
#include <chrono>
#include <cstring>
#include <thread>

#include "collectives/device_group_impl.h"

namespace pycomm {
namespace {

using device::Complaint;
using device::Control;

uint32_t load(const uint32_t& word) { return __atomic_load_n(&word, __ATOMIC_ACQUIRE); }
uint64_t load(const uint64_t& word) { return __atomic_load_n(&word, __ATOMIC_ACQUIRE); }

/// The first reason stays.
void tell(Control& control, int rank, const std::string& reason) noexcept {
  uint32_t none = Control::kNone;
  if (!__atomic_compare_exchange_n(&control.abort, &none, Control::kWriting, false,
                                   __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
    return;
  }
  control.abort_rank = rank;
  const size_t bytes = reason.copy(control.reason, sizeof control.reason - 1);
  control.reason[bytes] = 0;
  __atomic_store_n(&control.abort, Control::kAborted, __ATOMIC_RELEASE);
}

}  // namespace

std::string DeviceGroup::Impl::called(uint64_t seq) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const OpTag& tag = recent_[seq % recent_.size()];
  return tag.seq == seq ? pycomm::describe(tag) : "operation #" + std::to_string(seq);
}

std::exception_ptr DeviceGroup::Impl::complaint() const {
  const Control& control = workspace_.control(rank_);
  std::vector<int> late;
  Complaint first{};
  for (int r = 0; r < size_; r++) {
    const uint64_t word = load(control.complaints[r]);
    if (word == 0) continue;
    const Complaint one = Complaint::of(word);
    const std::string self = "rank " + std::to_string(rank_) + ": ";
    if (one.kind == Complaint::kMismatch) {
      return std::make_exception_ptr(
          WireMismatch(self + called(one.seq) + " met another call of rank " + std::to_string(r) +
                       ": all ranks must make the same calls in the same order"));
    }
    if (late.empty()) first = one;
    late.push_back(r);
  }
  if (late.empty()) return nullptr;
  std::string ranks;
  for (const int r : late) ranks += (ranks.empty() ? "" : ", ") + std::to_string(r);
  return std::make_exception_ptr(
      Timeout("rank " + std::to_string(rank_) + ": " + called(first.seq) + " waited " +
                  std::to_string(timeout_) + " ms for rank(s) " + ranks + ", in meeting " +
                  std::to_string(first.phase) + " of it",
              late));
}

void DeviceGroup::Impl::check() {
  failure_.rethrow();
  if (std::exception_ptr error = complaint()) {
    failure_.set(error);
    abort(to_reason(error));
  }
  const Control& control = workspace_.control(rank_);
  if (!failure_.happened() && load(control.abort) == Control::kAborted) {
    failure_.set(from_reason(std::make_exception_ptr(Error(
        "rank " + std::to_string(control.abort_rank) + " aborted the group: " + control.reason))));
  }
  failure_.rethrow();
}

void DeviceGroup::Impl::abort(const std::string& reason) noexcept {
  for (int r = 0; r < size_; r++) tell(workspace_.control(r), rank_, reason);
}

// Peers read our memory until they have ended their last operation.
void DeviceGroup::Impl::leave() noexcept {
  constexpr Milliseconds kPatience(2000);
  if (fork_.in_child()) return;
  __atomic_store_n(&workspace_.control(rank_).left, 1u, __ATOMIC_RELEASE);
  if (workspace_.on_host()) return;
  const Deadline deadline = Deadline::after(kPatience);
  for (int r = 0; r < size_; r++) {
    while (load(workspace_.control(r).left) == 0 && !deadline.expired()) {
      std::this_thread::sleep_for(Milliseconds(1));
    }
  }
}

}  // namespace pycomm
