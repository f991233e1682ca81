// Where the passes of optimizers run, and threads for them: they are called too rarely to keep
// some.
#pragma once
#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "core/arithmetic.h"
#include "core/types.h"

namespace pycomm {

/// Threads of the host, of which a pass takes this many at most; or a stream of a device.
struct Where {
  int threads = 1;
  Stream stream;

  bool on_device() const { return stream.device == Device::cuda; }
};

/// Calls act(item) for each item below `items`, which together go over `values`; few values are
/// for the caller's thread alone. No result may depend on which thread has taken an item.
template <typename Act>
void spread(size_t items, size_t values, int threads, const Act& act) {
  constexpr size_t kPerThread = size_t{1} << 18;  // values that are worth a thread
  const size_t worth = std::max<size_t>(1, values / kPerThread);
  const size_t count = std::min({static_cast<size_t>(std::max(1, threads)), worth, items});
  if (count <= 1) {
    for (size_t i = 0; i < items; i++) act(i);
    return;
  }
  std::atomic<size_t> next{0};
  const auto work = [&] {
    const DefaultArithmetic arithmetic;
    for (size_t i; (i = next.fetch_add(1)) < items;) act(i);
  };
  std::vector<std::thread> others;
  for (size_t t = 1; t < count; t++) others.emplace_back(work);
  work();
  for (std::thread& other : others) other.join();
}

}  // namespace pycomm
