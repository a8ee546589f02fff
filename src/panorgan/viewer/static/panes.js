// Pictures: one NiiVue canvas for each scan with its labels.
const { Niivue, NVImage, SLICE_TYPE, SHOW_RENDER, DRAG_MODE } = globalThis.niivue;

export const VIEWS = {
  axial: SLICE_TYPE.AXIAL, coronal: SLICE_TYPE.CORONAL, sagittal: SLICE_TYPE.SAGITTAL,
  render: SLICE_TYPE.RENDER, multi: SLICE_TYPE.MULTIPLANAR,
};
const ACROSS = { axial: 2, coronal: 1, sagittal: 0, multi: 2, render: 2 };
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

  // The middle of an organ in the slice that shows most of it, in mm; null where it is not drawn.
  middleOf(name) {
    const number = (this.facts.labels ?? []).indexOf(name) + 1;
    return this.labels && number ? middleOf(this.labels, number) : null;
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

function middleOf(image, number) {
  const [, nx, ny, nz] = image.hdr.dims;
  const voxels = image.img;
  let best = { count: 0 };
  for (let z = 0, i = 0; z < nz; z++) {
    let count = 0, sumX = 0, sumY = 0;
    for (let y = 0; y < ny; y++) {
      for (let x = 0; x < nx; x++, i++) {
        if (voxels[i] === number) { count++; sumX += x; sumY += y; }
      }
    }
    if (count > best.count) best = { count, at: [sumX / count, sumY / count, z, 1] };
  }
  if (!best.count) return null;
  return image.hdr.affine.slice(0, 3).map((row) => row.reduce((sum, value, axis) => sum + value * best.at[axis], 0));
}
