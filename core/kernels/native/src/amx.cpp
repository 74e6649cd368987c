#define HR_AVX512
#define HR_TILES
#define HR_ISA hr_ns_amx
#include "draw.h"
#include "kernels.h"

extern const Dialect hr_amx;
const Dialect hr_amx = {
    "amx", HR_ISA::tile, HR_ISA::draw, HR_ISA::read_all, HR_ISA::multiply,
    HR_ISA::block_divisors, HR_ISA::product_scratch, HR_ISA::OWN_ROWS, 3, 3
};
