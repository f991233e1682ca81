// Threads for one operation over a matrix, for operations that are called too rarely to keep
// threads.
#pragma once
#include <algorithm>
#include <thread>
#include <vector>

#include "core/arithmetic.h"
#include "core/types.h"

namespace pycomm {

/// Calls act(begin, end, thread) for parts of the rows, each a multiple of `block` but the last. A
/// matrix of few values is one part.
template <typename Act>
void in_parallel(size_t rows, size_t columns, size_t block, int threads, const Act& act) {
  constexpr size_t kPerThread = size_t{1} << 18;  // values that are worth a thread
  const size_t worth = std::max<size_t>(1, rows * columns / kPerThread);
  const size_t count = std::min<size_t>(std::max(1, threads), worth);
  const size_t each = ((rows + count - 1) / count + block - 1) / block * block;
  std::vector<std::thread> others;
  for (size_t t = 1; t * each < rows; ++t) {
    others.emplace_back([&act, t, each, rows] {
      const DefaultArithmetic arithmetic;
      act(t * each, std::min(rows, (t + 1) * each), t);
    });
  }
  act(0, std::min(rows, each), 0);
  for (std::thread& other : others) other.join();
}

}  // namespace pycomm
