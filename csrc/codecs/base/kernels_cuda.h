// Table of the kernels of a .cu file, by the names that launches give them. nvcc compiles what is
// in the table; NVRTC ignores it and compiles each kernel that is asked for.
#pragma once
#if !defined(PYCOMM_KERNELS) && defined(__CUDACC_RTC__)
#define PYCOMM_KERNELS(file, ...) static_assert(true, "")
#elif !defined(PYCOMM_KERNELS)
#include <initializer_list>

namespace pycomm::codecs {

struct Kernel {
  const char* name;
  const void* function;
  size_t params;  ///< bytes of its argument
};

template <typename Params>
Kernel kernel(const char* name, void (*function)(Params)) {
  return {name, reinterpret_cast<const void*>(function), sizeof(Params)};
}

/// Adds kernels to the table of the process, when the library is loaded.
struct Kernels {
  Kernels(std::initializer_list<Kernel> kernels);
};

}  // namespace pycomm::codecs

/// The kernels of a file, each by PYCOMM_KERNEL; once in a file, in the namespace pycomm::codecs.
#define PYCOMM_KERNELS(file, ...) static const Kernels file##_kernels({__VA_ARGS__})
/// One kernel, with its template arguments as launches write them.
#define PYCOMM_KERNEL(...) kernel(#__VA_ARGS__, __VA_ARGS__)
#endif
