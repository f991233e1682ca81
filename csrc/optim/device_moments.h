// The passes of moments.h on a GPU, as launches of the kernels in moments.cu. Numbers that decide
// about a step are on the device (Numbers of moments_params.h), so that nothing waits for it.
#pragma once
#include <vector>

#include "codecs/base/launch.h"
#include "core/types.h"
#include "optim/moments.h"

namespace pycomm::moments {

/// See HostMoments; all memory is the device's, and each pass is one launch, or two.
class PYCOMM_API DeviceMoments : public Matrices {
 public:
  void squares(const Pass& pass, const std::vector<Turn>& turns, const Stream& stream) const;
  void encode(const Pass& pass, const std::vector<Turn>& turns, const Stream& stream) const;
  void sent(const void* values, DType dtype, const std::vector<Sending>& sendings, bool divides,
            const float* swapped, const Stream& stream) const;
  void land(void* values, DType dtype, double unit, bool divides, const Stream& stream) const;
  void collect(float* sums, const Stream& stream) const;
  void commit(const float* sums, const std::vector<Commit>& how, uint32_t ranks,
              const Stream& stream) const;
  void move(const std::vector<Step>& steps, DType dtype, const Stream& stream) const;

 private:
  void square(const Pass& pass, const std::vector<Turn>& turns, bool is_new,
              const Stream& stream) const;
};

}  // namespace pycomm::moments
