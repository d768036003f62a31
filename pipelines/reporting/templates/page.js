(function(){
var root=document.documentElement;root.classList.add('script');
var data=JSON.parse(document.getElementById('thresholds').textContent);
document.querySelectorAll('[data-sweep]').forEach(function(box){
  var rows=data[+box.dataset.sweep],slider=box.querySelector('input'),cursor=box.querySelector('.cursor');
  function show(){
    var row=rows[+slider.value];
    box.querySelectorAll('[data-field]').forEach(function(cell){
      var value=row[cell.dataset.field];
      cell.textContent=value===null?'\u2013':cell.dataset.percent?Math.round(100*value)+'%':value.toFixed(2);
    });
    if(cursor){var l=+cursor.dataset.left,r=+cursor.dataset.right,x=l+(r-l)*row.threshold;
      cursor.setAttribute('x1',x);cursor.setAttribute('x2',x);}
    slider.setAttribute('aria-valuetext','threshold '+row.threshold.toFixed(2));
  }
  slider.addEventListener('input',show);show();
});
document.querySelectorAll('.sample').forEach(function(sample){
  var rounds=[].slice.call(sample.querySelectorAll('.round')),text=sample.querySelector('.text');
  var line=sample.querySelector('.inspector'),at=-1;
  if(!rounds.length)return;
  rounds.forEach(function(round,index){
    round.dataset.tip=round.getAttribute('title');round.removeAttribute('title');
    round.addEventListener('mouseenter',function(){show(index);});
    round.addEventListener('click',function(){show(index);});
  });
  text.tabIndex=0;text.setAttribute('role','group');
  text.setAttribute('aria-label','Text by decoding rounds; left and right arrow keys go from round to round');
  function show(index){
    if(at>=0)rounds[at].classList.remove('here');
    at=index;rounds[at].classList.add('here');sample.classList.add('active');line.textContent=rounds[at].dataset.tip;
  }
  text.addEventListener('keydown',function(event){
    var step=event.key==='ArrowRight'?1:event.key==='ArrowLeft'?-1:0;
    if(step){event.preventDefault();show(Math.min(rounds.length-1,Math.max(0,at+step)));}
  });
});
addEventListener('beforeprint',function(){
  document.querySelectorAll('details').forEach(function(part){part.open=true;});
});
var box=document.getElementById('drafts'),texts=document.getElementById('texts');
if(box)box.addEventListener('change',function(){texts.classList.toggle('show-drafts',box.checked);});
})();
(function(){
var box=document.getElementById('load'),node=document.getElementById('serving-data');
if(!box||!node)return;
var data=JSON.parse(node.textContent);
if(!data)return;
var costs=data.costs,rounds=data.rounds;
function interpolate(x,xs,ys){
  var last=xs.length-1,k=1;
  if(x<=xs[0])return ys[0];
  if(x>xs[last])return ys[last]*x/xs[last];
  while(xs[k]<x)k++;
  return ys[k-1]+(ys[k]-ys[k-1])*(x-xs[k-1])/(xs[k]-xs[k-1]);
}
var times=costs.steps_per_second.map(function(speed){return 1/speed;});
function seconds(tokens,users){
  var draft=costs.draft.rows.length?interpolate(users,costs.draft.rows,costs.draft.seconds):0;
  return interpolate(tokens,costs.tokens,times)+draft;
}
function atThreshold(level,users){
  var drafts=0,tokens=0,n=rounds.accepted.length;
  for(var i=0;i<n;i++){
    var row=rounds.confidence[i],length=0;
    while(length<row.length&&row[length]>=1000*level)length++;
    drafts+=length;tokens+=Math.min(rounds.accepted[i],length)+1;
  }
  drafts/=n;tokens/=n;
  var time=seconds(users*(1+drafts),users);
  return{policy:'threshold',users:users,drafts:drafts,accepted_length:tokens,tokens_per_second:users*tokens/time,
    tokens_per_second_user:tokens/time};
}
var load=box.querySelector('[data-control=users]'),level=box.querySelector('[data-control=threshold]');
var cursor=box.parentNode.querySelector('.cursor'),digits={drafts:2,accepted_length:2};
function show(){
  var users=data.users[+load.value],points={},most=0,best=null;
  data.replayed.forEach(function(point){if(point.users===users)points[point.policy]=point;});
  if(level){
    points.threshold=atThreshold(+level.value,users);
    box.querySelector('[data-out=threshold]').textContent=(+level.value).toFixed(2);
  }
  Object.keys(points).forEach(function(name){
    if(points[name].tokens_per_second>most){most=points[name].tokens_per_second;best=name;}
  });
  box.querySelectorAll('[data-policy]').forEach(function(row){
    var point=points[row.dataset.policy];
    row.classList.toggle('best',row.dataset.policy===best);
    row.querySelector('i').style.width=(100*point.tokens_per_second/most).toFixed(1)+'%';
    row.querySelectorAll('[data-field]').forEach(function(cell){
      cell.textContent=point[cell.dataset.field].toFixed(digits[cell.dataset.field]||1);
    });
  });
  box.querySelectorAll('[data-out=users]').forEach(function(out){out.textContent=users;});
  load.setAttribute('aria-valuetext',users+' users');
  box.querySelector('[data-out=verdict]').textContent=best==='none'?'Here nothing beats not drafting.':
    'Most tokens a second: '+data.names[best]+', '+(most/points.none.tokens_per_second).toFixed(2)+
    ' times as many as without drafts.';
  if(cursor){
    var l=+cursor.dataset.left,r=+cursor.dataset.right,x=l+(r-l)*load.value/Math.max(data.users.length-1,1);
    cursor.setAttribute('x1',x);cursor.setAttribute('x2',x);
  }
}
load.addEventListener('input',show);if(level)level.addEventListener('input',show);show();
})();
