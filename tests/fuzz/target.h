// Fuzz target: LLVMFuzzerTestOneInput, which libFuzzer and standalone.cpp call, and what each needs.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

/// A promise that an input has broken.
inline void require(bool kept, const char* promise) {
  if (kept) return;
  std::fprintf(stderr, "broken promise: %s\n", promise);
  std::abort();
}

/// Reads numbers from an input; zeros behind its end.
class Reader {
 public:
  Reader(const uint8_t* data, size_t size) : data_(data), end_(data + size) {}
  uint8_t byte() { return data_ < end_ ? *data_++ : 0; }
  uint32_t word() {
    uint32_t value = 0;
    for (int i = 0; i < 4; i++) value |= static_cast<uint32_t>(byte()) << (8 * i);
    return value;
  }
  bool empty() const { return data_ == end_; }
  size_t left() const { return static_cast<size_t>(end_ - data_); }
  /// Up to `bytes` of what is left.
  std::vector<uint8_t> take(size_t bytes) {
    const uint8_t* begin = data_;
    data_ += bytes < left() ? bytes : left();
    return {begin, data_};
  }

 private:
  const uint8_t* data_;
  const uint8_t* end_;
};
