#include "collectives/algorithms/context.h"

#include <new>

namespace pycomm {

uint8_t* Scratch::get(size_t bytes) {
  constexpr size_t kLine = 64;
  if (bytes <= size_) return data_;
  std::free(data_);
  size_ = (bytes + kLine - 1) / kLine * kLine;
  data_ = static_cast<uint8_t*>(std::aligned_alloc(kLine, size_));
  if (data_) return data_;
  size_ = 0;
  throw std::bad_alloc();
}

void CollectiveContext::wait_all() {
  wait_until([this] {
    for (int i = 1; i < size(); i++) {
      if (mesh_.pending(Lane::collective, member(after(i)))) return false;
    }
    return true;
  });
}

void CollectiveContext::pause(int quiet) {
  mesh_.pause(Lane::collective, quiet, deadline_);
  if (!mesh_.should_check(quiet)) return;
  mesh_.check(Lane::collective);
  interrupts_.check();
  if (!deadline_.expired()) return;
  throw Timeout("rank " + std::to_string(mesh_.rank()) + ": " + describe(tag_) +
                    " did not end within the timeout of " +
                    std::to_string(deadline_.limit().count()) + " ms",
                mesh_.missing(source_));
}

}  // namespace pycomm
