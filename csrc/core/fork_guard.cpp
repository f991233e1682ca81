#include "core/fork_guard.h"

#include <sys/mman.h>
#include <unistd.h>

#include <mutex>
#include <new>

#include "core/error.h"

namespace pycomm {
namespace {

/// Returns a page that is zero in every child, however it was forked; null if the kernel has none.
std::atomic<uint64_t>* make_mark() {
  const auto bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  void* page = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return nullptr;
  if (::madvise(page, bytes, MADV_WIPEONFORK) != 0) {
    ::munmap(page, bytes);
    return nullptr;
  }
  return new (page) std::atomic<uint64_t>(0);
}

std::once_flag made;
std::atomic<uint64_t> processes{0};

}  // namespace

std::atomic<std::atomic<uint64_t>*> ForkGuard::mark_{nullptr};

uint64_t ForkGuard::current() {
  std::call_once(made, [] { mark_.store(make_mark(), std::memory_order_release); });
  std::atomic<uint64_t>* mark = mark_.load(std::memory_order_acquire);
  if (!mark) return static_cast<uint64_t>(::getpid());
  uint64_t process = mark->load();
  // The count is inherited, so a child has a number that none of its ancestors had.
  if (process == 0 && mark->compare_exchange_strong(process, ++processes)) return mark->load();
  return process;
}

void ForkGuard::throw_in_child(const std::string& who, const char* what) {
  throw Error(who + ": " + what +
              " was called in a forked child, but the group is its parent's, "
              "whose other ranks would take the child for it; call it in the parent, or make a "
              "group of the children's own");
}

}  // namespace pycomm
