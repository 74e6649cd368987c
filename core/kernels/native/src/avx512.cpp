#define HR_AVX512
#define HR_ISA hr_ns_avx512
#include "draw.h"
#include "kernels.h"

extern const Dialect hr_avx512;
const Dialect hr_avx512 = {
    "avx512", HR_ISA::tile, HR_ISA::draw, HR_ISA::read_all, HR_ISA::multiply,
    HR_ISA::block_divisors, HR_ISA::product_scratch, HR_ISA::OWN_ROWS, 5, 16
};
