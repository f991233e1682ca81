// The core on AArch64, for tests/core/test_arithmetic.py: checksums, and reductions of what stands
// on the standard input.
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "core/crc32c.h"
#include "core/op.h"
#include "core/reduce.h"

using namespace pycomm;

namespace {

/// Prints the ways, fastest first; 0 if all give what the table gives.
int checksums() {
  std::mt19937 random(1);
  std::vector<uint8_t> data(50000);
  for (uint8_t& byte : data) byte = static_cast<uint8_t>(random());
  const std::vector<std::string> ways = crc32c_ways();
  for (const std::string& way : ways) std::printf("%s\n", way.c_str());
  for (int i = 0; i < 3000; i++) {
    const size_t size = random() % (i % 8 == 0 ? 40000 : 700), begin = random() % 64;
    const Span<const uint8_t> part{data.data() + begin, size};
    const uint32_t before = random(), want = crc32c_by("table", part, before);
    for (const std::string& way : ways) {
      if (crc32c_by(way, part, before) != want) return 1;
    }
    if (crc32c(part, before) != want) return 1;
  }
  return 0;
}

struct Job {
  int32_t dtype, op, count, numel;
  uint64_t fpcr;  ///< how the thread is set to calculate
};

bool get(void* to, size_t bytes) { return std::fread(to, 1, bytes, stdin) == bytes; }

/// 0 if the thread is set as before after each reduction.
int reductions() {
  for (Job job; get(&job, sizeof job);) {
    const auto dtype = static_cast<DType>(job.dtype);
    const auto op = static_cast<ReduceOp>(job.op);
    const size_t bytes = static_cast<size_t>(job.numel) * size_of(dtype);
    std::vector<std::vector<uint8_t>> inputs(job.count, std::vector<uint8_t>(bytes));
    std::vector<const void*> addresses;
    for (auto& input : inputs) {
      if (!get(input.data(), bytes)) return 2;
      addresses.push_back(input.data());
    }
    std::vector<uint8_t> out(bytes);
    asm volatile("msr fpcr, %0" ::"r"(job.fpcr) : "memory");
    const auto numel = static_cast<size_t>(job.numel);
    if (op == ReduceOp::premul_sum) {
      scale(dtype, addresses[0], out.data(), numel, 0.3);
    } else {
      reduce({dtype, op, addresses.data(), job.count, out.data(), nullptr, numel, 0});
    }
    uint64_t after = 0;
    asm volatile("mrs %0, fpcr" : "=r"(after)::"memory");
    if (after != job.fpcr) return 3;
    asm volatile("msr fpcr, xzr" ::: "memory");
    std::fwrite(out.data(), 1, bytes, stdout);
  }
  return 0;
}

}  // namespace

int main(int, char** argv) {
  return std::strcmp(argv[1], "checksums") == 0 ? checksums() : reductions();
}
