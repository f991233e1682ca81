// A coverage build includes this file in every source (-include). A process that ends by _exit, as a
// forked one does, writes no counters: exit.c, which is preloaded, calls what is registered here.
#pragma once
#include <dlfcn.h>

extern "C" void __gcov_dump();

namespace {
[[gnu::unused]] const bool registered_for_coverage = [] {
  void* found = dlsym(RTLD_DEFAULT, "call_before_exit");
  if (found) reinterpret_cast<void (*)(void (*)())>(found)(__gcov_dump);
  return true;
}();
}  // namespace
