/* model/place.h - puts a loaded checkpoint's weights where the device reads them.
 *
 * Why      A checkpoint is opened as views into the mapped file; a device with memory of its own
 *          reads copies, in a form that its kernels like.
 * Owner    Once, by the thread that opens the model, before its first pass.
 */
#ifndef MODEL_PLACE_H
#define MODEL_PLACE_H

#include "common/model/weights.h"

struct kern_dev;

/* Every weight, vector and table of w goes to the device (kern_dev_place); w points there
 * afterwards and may be used by this device's ops alone. Nothing to do where device memory is host
 * memory. What was placed is freed with the device. TOW_ENOMEM, TOW_EDEVICE. */
int model_weights_place(struct model_weights *w, struct kern_dev *dev, struct tow_err *err);

#endif
