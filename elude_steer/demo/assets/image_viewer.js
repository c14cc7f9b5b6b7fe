// The image viewer: switches between the image and its heat maps, and has a brush to mark a region.
// props.value is {views: [{name, source, framed}], chosen}; a new image adds {fresh, box, example}: a number that identifies the
// load, a region to mark as [left, top, right, bottom] in shares of the image, and the number of the example, if it is
// one. A new image clears the mark.
const find = (selector) => element.querySelector(selector);
const viewer = find('.easel'), stage = find('.stage'), frame = find('.frame'), shown = find('.shown');
const mark = find('.mark'), ring = find('.ring'), views = find('.views'), tools = find('.tools');
const brush = find('.brush'), label = find('.tools label'), range = find('.tools input'), clear = find('.clear');
const pen = mark.getContext('2d');
let hasMark = false, cursor = null, lastDot = null, pendingBox = null, loadedImage = null;

function clearMark() {
  pen.clearRect(0, 0, mark.width, mark.height);
  hasMark = false;
  clear.hidden = true;
}

function showView(index) {
  const list = props.value?.views ?? [];
  frame.hidden = !list.length;
  tools.hidden = !list.length;
  find('.empty').hidden = !!list.length;
  find('.legend').hidden = !index;
  if (!list.length) return;
  const view = list[index];
  find('.framed').hidden = !view.framed;
  shown.src = view.source;
  shown.alt = index ? `where ${view.name} fires${view.framed ? '; framed: the patches that were changed' : ''}` : 'the image';
  views.replaceChildren(...(list.length < 2 ? [] : list).map((one, number) => {
    const button = document.createElement('button');
    button.type = 'button';
    button.textContent = one.name;
    button.setAttribute('aria-pressed', String(number === index));
    button.onclick = () => { showView(number); views.children[number].focus(); };
    return button;
  }));
}

function update() {
  const value = props.value ?? {};
  showView(value.chosen ?? 0);
  if (!value.fresh || value.fresh === loadedImage) return;
  loadedImage = value.fresh;
  clearMark();
  pendingBox = value.box?.length ? value.box : null;
  if (shown.complete) drawBox();
  document.querySelectorAll('#examples [data-row]').forEach((one) => {
    one.setAttribute('aria-pressed', String(JSON.parse(one.dataset.row).example === value.example));
  });
}

// Mark the region of a recipe, given in shares of the image.
function drawBox() {
  if (!pendingBox) return;
  const [left, top, right, bottom] = pendingBox;
  pen.fillStyle = '#ffd640';
  pen.fillRect(left * mark.width, top * mark.height, (right - left) * mark.width, (bottom - top) * mark.height);
  pendingBox = null;
  hasMark = true;
  clear.hidden = false;
}

shown.onload = () => {
  if (mark.width !== shown.naturalWidth || mark.height !== shown.naturalHeight) {
    mark.width = shown.naturalWidth;
    mark.height = shown.naturalHeight;
    clearMark();
  }
  drawBox();
};

// ---- the brush
function brushSize() { return Number(range.value); }

function drawTo(point) {
  pen.strokeStyle = pen.fillStyle = '#ffd640';
  pen.lineWidth = brushSize();
  pen.lineCap = 'round';
  pen.beginPath();
  pen.moveTo((lastDot ?? point).x, (lastDot ?? point).y);
  pen.lineTo(point.x, point.y + 0.01);
  pen.stroke();
  lastDot = point;
  hasMark = true;
  clear.hidden = false;
}

function pointOf(event) {
  const box = mark.getBoundingClientRect();
  return { x: (event.clientX - box.left) * mark.width / box.width, y: (event.clientY - box.top) * mark.height / box.height };
}

function moveCursor(point) {
  cursor = point;
  const box = mark.getBoundingClientRect(), scale = box.width / mark.width;
  ring.hidden = false;
  ring.style.left = `${point.x * scale}px`;
  ring.style.top = `${point.y * scale}px`;
  ring.style.width = ring.style.height = `${brushSize() * scale}px`;
}

brush.onclick = () => {
  const active = brush.getAttribute('aria-pressed') !== 'true';
  brush.setAttribute('aria-pressed', String(active));
  viewer.classList.toggle('brushing', active);
  label.hidden = !active;
  ring.hidden = true;
  if (active) mark.setAttribute('tabindex', '0'); else mark.removeAttribute('tabindex');
};
clear.onclick = () => { clearMark(); brush.focus(); };
mark.onpointerdown = (event) => {
  if (!event.isPrimary) return;
  mark.setPointerCapture(event.pointerId);
  lastDot = null;
  drawTo(pointOf(event));
  event.preventDefault();
};
mark.onpointermove = (event) => {
  if (!event.isPrimary) return;
  moveCursor(pointOf(event));
  if (event.buttons) drawTo(pointOf(event));
};
mark.onpointerup = () => { lastDot = null; };
mark.onpointerleave = () => { ring.hidden = true; };
mark.onkeydown = (event) => {
  const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  if (!step && event.key !== ' ') return;
  event.preventDefault();
  const from = cursor ?? { x: mark.width / 2, y: mark.height / 2 }, pixels = event.shiftKey ? 4 : 16;
  const clamp = (value, limit) => Math.min(limit, Math.max(0, value));
  moveCursor(
    step ? { x: clamp(from.x + pixels * step[0], mark.width), y: clamp(from.y + pixels * step[1], mark.height) } : from,
  );
  if (event.key === ' ') { lastDot = null; drawTo(cursor); }
};

// ---- images that are dropped or pasted are passed to the upload button
function upload(files) {
  const file = [...files].find(Boolean), input = document.querySelector('input[type=file]:has(+ #bring)');
  if (!file || !input) return;
  const list = new DataTransfer();
  list.items.add(file);
  input.files = list.files;
  input.dispatchEvent(new Event('change', { bubbles: true }));
}
stage.ondragover = (event) => { event.preventDefault(); stage.classList.add('over'); };
stage.ondragleave = () => stage.classList.remove('over');
stage.ondrop = (event) => {
  event.preventDefault();
  stage.classList.remove('over');
  upload(event.dataTransfer.files);
};
// Without this, a browser replaces the whole page by an image that is dropped outside the viewer.
for (const name of ['dragover', 'drop']) document.addEventListener(name, (event) => event.preventDefault());
// Gradio keeps the list of words open after a pick, where it covers the Steer button.
document.addEventListener('pointerup', (event) => {
  if (event.target.closest?.('#minus [role=option], #plus [role=option]')) setTimeout(() => document.activeElement.blur());
});
document.addEventListener('paste', (event) => {
  const files = [...(event.clipboardData?.files ?? [])].filter((file) => file.type.startsWith('image/'));
  if (files.length) { event.preventDefault(); upload(files); }
});

// The mark that the page sends with a request: a PNG data URI, white on black, or '' without a mark.
window.eludeSteerMark = () => {
  if (!hasMark) return '';
  const copy = document.createElement('canvas');
  copy.width = mark.width;
  copy.height = mark.height;
  const context = copy.getContext('2d'), pixels = pen.getImageData(0, 0, mark.width, mark.height);
  for (let i = 0; i < pixels.data.length; i += 4) {
    pixels.data.fill(pixels.data[i + 3] > 127 ? 255 : 0, i, i + 3);
    pixels.data[i + 3] = 255;
  }
  context.putImageData(pixels, 0, 0);
  return copy.toDataURL('image/png');
};
watch('value', update);
update();
