#define HR_ISA hr_ns_portable
#include "draw.h"
#include "kernels.h"

extern const Dialect hr_portable;
const Dialect hr_portable = {
    "portable", HR_ISA::tile, HR_ISA::draw, HR_ISA::read_all, HR_ISA::multiply,
    HR_ISA::block_divisors, HR_ISA::product_scratch, HR_ISA::OWN_ROWS, 5, 16
};
