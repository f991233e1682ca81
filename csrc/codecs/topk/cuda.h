// CUDA part of topk, on the stream of the call: topk.cu, or no_cuda.cpp in a build without CUDA,
// where each function throws Error.
#pragma once
#include "codecs/base/codec.h"
#include "codecs/topk/topk.h"

namespace pycomm::codecs::topk {

void encode_cuda(const Format& format, const EncodeArgs& args);
void decode_cuda(const Format& format, Span<const uint8_t> payload, Span<float> out, bool add,
                 Stream stream);

}  // namespace pycomm::codecs::topk
