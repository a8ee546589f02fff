// Pictures: one NiiVue canvas for each scan with its labels.
const { Niivue, NVImage, SLICE_TYPE, SHOW_RENDER, DRAG_MODE } = globalThis.niivue;

export const VIEWS = {
  axial: SLICE_TYPE.AXIAL, coronal: SLICE_TYPE.CORONAL, sagittal: SLICE_TYPE.SAGITTAL,
  render: SLICE_TYPE.RENDER, multi: SLICE_TYPE.MULTIPLANAR,
};
const ACROSS = { axial: 2, coronal: 1, sagittal: 0, multi: 2, render: 2 };
const LABELS = 256;
const SCAN_IN_3D = 0.12; // so much of the body is left around the organs

// Each window is [centre, width] in HU; null: from the scan itself.
export const CT_WINDOWS = {
  "Abdomen": [40, 400], "Liver": [90, 150], "Lung": [-600, 1500], "Mediastinum": [50, 350], "Bone": [400, 1800],
  "Brain": [40, 80], "Whole range": null,
};
export const OTHER_WINDOWS = { "Auto": "auto", "Whole range": null };

export class PaneView {
  constructor(facts, onWhere) {
    this.facts = facts;
    this.element = document.createElement("figure");
    this.caption = document.createElement("figcaption");
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", `${facts.title}: scan with organs`);
    const box = document.createElement("div");
    box.className = "canvas";
    box.append(this.canvas);
    this.element.append(this.caption, box);
    this.nv = new Niivue({
      backColor: [0, 0, 0, 1], crosshairColor: [1, 1, 1, 0.55], crosshairWidth: 1.5, crosshairWidthUnit: "mm",
      crosshairGap: 8, show3Dcrosshair: false,
      isRadiologicalConvention: true, dragAndDropEnabled: false, isColorbar: false, loadingText: "",
      multiplanarShowRender: SHOW_RENDER.ALWAYS, multiplanarPadPixels: 4, clipPlaneHotKey: "", cycleClipPlaneHotKey: "",
      viewModeHotKey: "", logLevel: "error", scrollRequiresFocus: false, isNearestInterpolation: false,
      dragMode: DRAG_MODE.contrast, fontSizeScaling: 0.35, fontMinPx: 12, isOrientCube: false,
    });
    this.nv.onLocationChange = (where) => onWhere(this, where);
    this.canvas.addEventListener("pointerenter", () => this.canvas.focus({ preventScroll: true }));
    this.scan = this.labels = this.outline = null;
  }

  async attach() {
    await this.nv.attachToCanvas(this.canvas);
  }

  // The same canvas for another case. It is empty at once: no patient's picture stands under another's name.
  reuse(facts) {
    this.facts = facts;
    this.canvas.setAttribute("aria-label", `${facts.title}: scan with organs`);
    this.nv.volumes = [];
    this.nv.overlays = [];
    this.nv.back = null;
    this.scan = this.labels = this.outline = this.labelBuffer = null;
    this.nv.drawScene();
  }

  title(text, quiet) {
    this.caption.replaceChildren(Object.assign(document.createElement("strong"), { textContent: text }));
    if (quiet) this.caption.append(Object.assign(document.createElement("span"), { textContent: quiet }));
  }

  // Shows what was loaded, in place of what is there; the place of the crosshair in the body stays.
  async show(scanBuffer, labelBuffer, range) {
    const [low, high] = range ?? [NaN, NaN];
    const scan = await NVImage.new(scanBuffer, "scan.nii", "gray", 1, null, low, high, true, 0.02, false, false, "", 0);
    const labels = labelBuffer ? await NVImage.new(labelBuffer, "labels.nii", "gray", 1, null, 0, 255, true) : null;
    const place = this.scan ? this.nv.frac2mm(this.nv.scene.crosshairPos) : null;
    this.nv.volumes = [];
    this.nv.overlays = [];
    this.scan = scan;
    this.range = wholeRange(scan);
    this.labels = labels;
    this.outline = null;
    this.paint();
    this.nv.addVolume(scan);
    if (labels) this.nv.addVolume(labels);
    if (place) this.nv.scene.crosshairPos = this.nv.mm2frac(place);
    else this.nv.scene.crosshairPos = [0.5, 0.5, 0.5];
  }

  // The reference's contours over these labels; null takes them away.
  async setOutline(buffer, names, look) {
    if (this.outline) this.nv.removeVolume(this.outline);
    this.outline = null;
    if (buffer) {
      this.outline = await NVImage.new(buffer.slice(0), "outline.nii", "gray", 1, null, 0, 255, true);
      keepBorders(this.outline);
      this.outlineNames = names;
      this.paint(look);
      this.nv.addVolume(this.outline);
    }
    this.nv.updateGLVolume();
  }

  // Colours: of each organ, and which are off. `opacity` from 0 to 1.
  paint(look = this.look) {
    this.look = look;
    if (!look) return;
    const { colours, off, opacity, view } = look;
    if (this.labels) {
      this.labels.setColormapLabel(table(this.facts.labels, colours, off));
      this.labels.opacity = view === "render" ? 1 : opacity;
    }
    if (this.outline) {
      this.outline.setColormapLabel(table(this.outlineNames, colours, off));
      this.outline.opacity = 1;
    }
    if (this.scan) this.scan.opacity = view === "render" && (this.labels || this.outline) ? SCAN_IN_3D : 1;
  }

  redraw() {
    if (this.scan) this.nv.updateGLVolume();
  }

  setView(view) {
    this.view = view;
    this.nv.setSliceType(VIEWS[view]);
  }

  setWindow(window) {
    if (!this.scan) return;
    [this.scan.cal_min, this.scan.cal_max] = rangeOf(window, this);
    this.nv.updateGLVolume();
  }

  // So many slices on, across the plane that is shown.
  step(count) {
    if (!this.scan) return;
    const dims = this.scan.dimsRAS;
    const axis = ACROSS[this.view];
    const place = [...this.nv.scene.crosshairPos];
    place[axis] = Math.min(1 - 0.5 / dims[axis + 1], Math.max(0.5 / dims[axis + 1], place[axis] + count / dims[axis + 1]));
    this.nv.scene.crosshairPos = place;
    this.nv.drawScene();
    this.nv.createOnLocationChange();
  }

  get mm() {
    return Array.from(this.nv.frac2mm(this.nv.scene.crosshairPos)).slice(0, 3);
  }

  goTo(mm) {
    if (!this.scan) return;
    this.nv.scene.crosshairPos = this.nv.mm2frac(mm);
    this.nv.drawScene();
    this.nv.createOnLocationChange();
  }

  // The slice in which these organs cover most, how many voxels that are, and where to look in it.
  fullestSlice(names) {
    const numbers = names.map((name) => (this.facts.labels ?? []).indexOf(name) + 1).filter(Boolean);
    return this.labels && numbers.length ? fullestSlice(this.labels, numbers) : { count: 0 };
  }

  // What is at the crosshair: the scan's value, and the organ.
  at(where) {
    const value = where.values[0]?.value;
    const number = this.labels ? Math.round(where.values[1]?.value ?? 0) : 0;
    return { value, organ: number ? this.facts.labels[number - 1] : "" };
  }

  close() {
    this.nv.volumes = [];
    this.nv.cleanup?.();
    this.nv.gl?.getExtension("WEBGL_lose_context")?.loseContext();
    this.element.remove();
  }
}

function table(names, colours, off) {
  const channel = (first) => names.map((name) => parseInt(colours[name].slice(first, first + 2), 16));
  return {
    R: [0, ...channel(1)], G: [0, ...channel(3)], B: [0, ...channel(5)],
    A: [0, ...names.map((name) => (off.has(name) ? 0 : 255))],
    I: [0, ...names.map((_, index) => index + 1)], labels: ["", ...names],
  };
}

function rangeOf(window, pane) {
  if (Array.isArray(window)) return [window[0] - window[1] / 2, window[0] + window[1] / 2];
  return window === "auto" ? [pane.scan.robust_min, pane.scan.robust_max] : pane.range;
}

export const rangeOfWindow = (window) => (Array.isArray(window) ? rangeOf(window) : undefined);

// Lowest and highest value; NiiVue's own are those of the middle of the scan. Of large scans some voxels are enough.
function wholeRange(scan) {
  const voxels = scan.img;
  const step = Math.max(1, Math.floor(voxels.length / 4e6));
  let low = Infinity, high = -Infinity;
  for (let i = 0; i < voxels.length; i += step) {
    if (voxels[i] < low) low = voxels[i];
    if (voxels[i] > high) high = voxels[i];
  }
  const slope = scan.hdr.scl_slope || 1;
  return [low * slope + scan.hdr.scl_inter, high * slope + scan.hdr.scl_inter];
}

// Only voxels that have a neighbour of another label stay.
function keepBorders(image) {
  const [, nx, ny, nz] = image.hdr.dims;
  const from = image.img;
  const kept = new from.constructor(from.length);
  const plane = nx * ny;
  for (let z = 0, i = 0; z < nz; z++) {
    for (let y = 0; y < ny; y++) {
      for (let x = 0; x < nx; x++, i++) {
        const own = from[i];
        if (own === 0) continue;
        const inside = x > 0 && x < nx - 1 && from[i - 1] === own && from[i + 1] === own
          && y > 0 && y < ny - 1 && from[i - nx] === own && from[i + nx] === own
          && (nz === 1 || ((z === 0 || from[i - plane] === own) && (z === nz - 1 || from[i + plane] === own)));
        if (!inside) kept[i] = own;
      }
    }
  }
  image.img = kept;
}

// Of the axial slices the one with most voxels of these labels, their count, and the middle of the largest label there.
function fullestSlice(image, numbers) {
  const { dims, affine } = image.hdr;
  const [nx, ny, nz] = dims.slice(1, 4);
  const axis = axialAxis(affine);
  const counts = new Uint32Array([nx, ny, nz][axis] * LABELS);
  const wanted = new Uint8Array(LABELS);
  for (const number of numbers) wanted[number] = 1;
  forVoxels(image, [[0, nx], [0, ny], [0, nz]], (label, place) => { if (wanted[label]) counts[place[axis] * LABELS + label]++; });
  let best = { count: 0 };
  for (let slice = 0; slice * LABELS < counts.length; slice++) {
    const sizes = counts.subarray(slice * LABELS, (slice + 1) * LABELS);
    const count = sizes.reduce((sum, size) => sum + size, 0);
    if (count > best.count) best = { count, slice, largest: sizes.indexOf(Math.max(...sizes)) };
  }
  if (!best.count) return best;
  const ranges = [[0, nx], [0, ny], [0, nz]];
  ranges[axis] = [best.slice, best.slice + 1];
  const sums = [0, 0, 0, 0];
  forVoxels(image, ranges, (label, place) => {
    if (label === best.largest) [...place, 1].forEach((value, along) => { sums[along] += value; });
  });
  const middle = sums.map((sum) => sum / sums[3]);
  return { count: best.count, mm: affine.slice(0, 3).map((row) => row.reduce((sum, value, along) => sum + value * middle[along], 0)) };
}

// The axis of the array that runs nearest to head and feet.
function axialAxis(affine) {
  const along = [0, 1, 2].map((axis) => Math.abs(affine[2][axis]) / Math.hypot(...affine.slice(0, 3).map((row) => row[axis])));
  return along.indexOf(Math.max(...along));
}

function forVoxels(image, [[x0, x1], [y0, y1], [z0, z1]], see) {
  const [, nx, ny] = image.hdr.dims;
  const place = [0, 0, 0];
  for (let z = z0; z < z1; z++) {
    for (let y = y0; y < y1; y++) {
      for (let x = x0, i = x0 + nx * (y + ny * z); x < x1; x++, i++) {
        place[0] = x; place[1] = y; place[2] = z;
        if (image.img[i]) see(image.img[i], place);
      }
    }
  }
}
