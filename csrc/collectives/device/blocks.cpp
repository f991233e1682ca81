#include "collectives/device/blocks.h"

#include <algorithm>
#include <map>
#include <mutex>

namespace pycomm::device {
namespace {

std::mutex mutex;

/// Blocks in use, by GPU. It outlives all groups, also those that end with the process.
std::map<int, int>& used() {
  static auto* const used = new std::map<int, int>;
  return *used;
}

}  // namespace

BlockShare::BlockShare(int index, int room, int most) : index_(index) {
  const std::lock_guard<std::mutex> lock(mutex);
  int& in_use = used()[index];
  const int left = room - in_use;
  count_ = std::max(1, std::min(most, in_use == 0 ? left : left / 2));
  in_use += count_;
}

BlockShare::~BlockShare() { shrink(0); }

void BlockShare::shrink(int count) {
  const std::lock_guard<std::mutex> lock(mutex);
  used()[index_] -= count_ - count;
  count_ = count;
}

}  // namespace pycomm::device
